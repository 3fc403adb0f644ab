"""One policy a file. A policy is known once its module is imported here."""

from sage_sched.policies import sage

__all__ = ["sage"]
