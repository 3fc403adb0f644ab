"""Counts the errors of a policy."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Failures:
    """Counts a policy's errors. If it cannot plan a pass, that pass serves requests by arrival. If
    it cannot rank a request, the request goes first. Only the first error is logged."""

    def __init__(self) -> None:
        self.num_failures = 0

    def count(self, task: str) -> None:
        """Count an error; call it in the `except` block. task: the operation that failed, for the
        log."""
        self.num_failures += 1
        if self.num_failures == 1:
            logger.exception(
                "the policy could not %s; instead, requests go first come, first served. "
                "Further failures are only counted (num_policy_errors).",
                task,
            )
