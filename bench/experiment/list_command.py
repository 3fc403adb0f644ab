"""sage-sched bench list."""

from bench.experiment.cli import configure_list as configure
from bench.experiment.cli import list_experiments as run

__all__ = ["configure", "run"]
