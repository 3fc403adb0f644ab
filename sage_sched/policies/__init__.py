"""One policy a file. A policy is known once its module is imported here."""

from sage_sched.policies import fastserve, ltr, oracle, sage, ssjf, trail, uniboost

__all__ = ["fastserve", "ltr", "oracle", "sage", "ssjf", "trail", "uniboost"]
