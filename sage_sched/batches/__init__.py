"""Runs batches with a finish time alongside online requests, and no earlier than needed."""

from sage_sched.batches.batch import Batch
from sage_sched.batches.batches import Batches, TooLate

__all__ = ["Batch", "Batches", "TooLate"]
