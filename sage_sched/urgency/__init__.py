"""Levels of urgency, with a bound on how far the more urgent may overtake the others."""

from sage_sched.urgency.hold_back import HoldBack
from sage_sched.urgency.policy import Urgency, UrgencyParameters, left_s

__all__ = ["HoldBack", "Urgency", "UrgencyParameters", "left_s"]
