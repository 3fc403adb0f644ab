"""Levels of urgency, with a bound on how far the more urgent may overtake the others."""

from sage_sched.urgency.policy import Urgency, UrgencyParameters

__all__ = ["Urgency", "UrgencyParameters"]
