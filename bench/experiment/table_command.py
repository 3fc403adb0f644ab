"""sage-sched bench table."""

from bench.experiment.cli import configure_table as configure
from bench.experiment.cli import print_tables as run

__all__ = ["configure", "run"]
