"""Errors of a policy."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Failures:
    """Errors of a policy, which cost a pass its order and nothing else. The first is logged."""

    def __init__(self) -> None:
        self.num_failures = 0

    def count(self, task: str) -> None:
        """Call it where the error is caught. task: what the policy could not do."""
        self.num_failures += 1
        if self.num_failures == 1:
            logger.exception(
                "the policy could not %s; first come, first served instead. "
                "Further failures are only counted (num_policy_errors).",
                task,
            )
