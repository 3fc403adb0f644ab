"""Nobody is left behind: promised turns, and tenants in turn."""

from sage_sched.fairness.promises import Promises
from sage_sched.fairness.tenants import Name, Service, Tenants

__all__ = ["Name", "Promises", "Service", "Tenants"]
