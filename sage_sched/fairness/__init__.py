"""Lets the tenants of a class take turns."""

from sage_sched.fairness.fair_shares import FairShares
from sage_sched.fairness.service import Name, Service

__all__ = ["FairShares", "Name", "Service"]
