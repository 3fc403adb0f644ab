"""Runs batches with a finish time beside online requests, and no further ahead than needed."""

from sage_sched.batches.batch import Batch
from sage_sched.batches.batches import Batches, TooLate

__all__ = ["Batch", "Batches", "TooLate"]
