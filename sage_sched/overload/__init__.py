"""Refuses requests whose answers would come too late, by their predicted waits in the policy's
order."""

from sage_sched.overload.config import OverloadConfig
from sage_sched.overload.overload import Overload, Refusal
from sage_sched.overload.waits import Newcomer

__all__ = ["Newcomer", "Overload", "OverloadConfig", "Refusal"]
