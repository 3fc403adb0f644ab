"""An SGLang plugin for tests: a server goes by step times that it has learned, however little they
differ from those before. How much they do depends on the host."""

from __future__ import annotations

from sage_sched import step_learner


def register() -> None:
    """The entry point."""
    step_learner._WORTH_TELLING = 0.0
