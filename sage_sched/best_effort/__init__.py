"""Latency-sensitive requests before best-effort ones, which give way inside a prefill (QLLM)."""

from sage_sched.best_effort.policy import Qllm, QllmParameters, those_who_pass

__all__ = ["Qllm", "QllmParameters", "those_who_pass"]
