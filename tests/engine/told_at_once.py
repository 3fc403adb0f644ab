"""An SGLang plugin for tests: learned step times take effect even if they hardly differ from those
before, as hosts differ."""

from __future__ import annotations

from sage_sched import step_learner


def register() -> None:
    """The entry point."""
    step_learner._WORTH_TELLING = 0.0
