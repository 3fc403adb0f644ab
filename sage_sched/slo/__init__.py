"""Defines classes of requests with deadlines, and a policy that meets the deadlines (ProServe)."""

from sage_sched.slo.classes import SloClaims, SloClass, SloConfig, Trust
from sage_sched.slo.deadlines import METRICS, Attainment, Deadlines, Tally
from sage_sched.slo.policy import Proserve, ProserveParameters
from sage_sched.slo.slide import Queue, Slide

__all__ = [
    "METRICS", "Attainment", "Deadlines", "Proserve", "ProserveParameters", "Queue",
    "Slide", "SloClaims", "SloClass", "SloConfig", "Tally", "Trust",
]  # fmt: skip
