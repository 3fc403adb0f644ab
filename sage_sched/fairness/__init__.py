"""Nobody is left behind: promised turns, and tenants in turn."""

from sage_sched.fairness.fair_shares import FairShares, Name, Service
from sage_sched.fairness.starvation_bound import StarvationBound

__all__ = ["FairShares", "Name", "Service", "StarvationBound"]
