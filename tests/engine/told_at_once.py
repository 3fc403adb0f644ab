"""An SGLang plugin for tests: learned step times take effect even if they hardly differ from those
before, as hosts differ."""

from __future__ import annotations

from sage_sched import step_learner


def register() -> None:
    """The entry point."""
    assert step_learner._WORTH_REPORTING > 0
    step_learner._WORTH_REPORTING = 0.0
