"""Serves latency-sensitive requests before best-effort ones (QLLM)."""

from sage_sched.best_effort.policy import Qllm, QllmParameters

__all__ = ["Qllm", "QllmParameters"]
