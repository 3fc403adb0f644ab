"""Nobody is left behind: promised turns, and tenants in turn."""

from sage_sched.fairness.promises import Promises
from sage_sched.fairness.tenants import FairShares, Name, Service

__all__ = ["FairShares", "Name", "Promises", "Service"]
