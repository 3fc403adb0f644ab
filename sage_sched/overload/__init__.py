"""Refuses or degrades requests whose answers would come too late, by their predicted waits in the
policy's order."""

from sage_sched.overload.config import Action, OverloadConfig
from sage_sched.overload.overload import Decision, Overload, Refusal

__all__ = ["Action", "Decision", "Overload", "OverloadConfig", "Refusal"]
