"""Bounds how often requests are overtaken, and lets tenants take turns."""

from sage_sched.fairness.fair_shares import FairShares, Name, Service
from sage_sched.fairness.starvation_bound import StarvationBound

__all__ = ["FairShares", "Name", "Service", "StarvationBound"]
