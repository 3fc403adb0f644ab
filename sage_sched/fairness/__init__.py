"""Nobody is left behind: promised turns, sessions that keep their place, and tenants in turn."""

from sage_sched.fairness.promises import Promises
from sage_sched.fairness.sessions import Sessions
from sage_sched.fairness.tenants import Name, Service, Tenants

__all__ = ["Name", "Promises", "Service", "Sessions", "Tenants"]
