"""sage-sched bench run."""

from bench.experiment.cli import configure_run as configure
from bench.experiment.cli import run_experiment as run

__all__ = ["configure", "run"]
