"""Nobody is left behind: promised turns, a bound on the time away, sessions that keep their place,
and tenants in turn."""

from sage_sched.fairness.away import Away
from sage_sched.fairness.promises import Promises
from sage_sched.fairness.tenants import Name, Service, Tenants

__all__ = ["Away", "Name", "Promises", "Service", "Tenants"]
