"""Serves by levels of urgency, with a bound on how far more urgent requests may overtake others."""

from sage_sched.urgency.policy import Urgency, UrgencyParameters

__all__ = ["Urgency", "UrgencyParameters"]
