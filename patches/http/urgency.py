"""Guesses a request's urgency from its prompt if the client does not give one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from patches.compat import UnsupportedServerError
from predictor_store.cached_file import expanded
from predictor_store.urgency.head import BUILTIN, UrgencyFileError, UrgencyHead
from sage_sched.app.config import UrgencyConfig
from sage_sched.job import DEFAULT_URGENCY, Hints

logger = logging.getLogger(__name__)


def refuse_urgency(config: UrgencyConfig) -> None:
    """Raise UnsupportedServerError if the model is missing or cannot be used."""
    try:
        UrgencyGuess(config)
    except (OSError, UrgencyFileError) as error:
        raise UnsupportedServerError(f"urgency.model: {error}") from error


class UrgencyGuess:
    """Guesses the urgency of one HTTP process's requests, if they have neither a class nor an
    urgency."""

    def __init__(self, config: UrgencyConfig) -> None:
        path = BUILTIN if config.model == "builtin" else expanded(config.model)
        self._head = UrgencyHead.read(path) if config.model else None
        self._num_guessed = [0] * 6
        self._num_failed = 0

    def hints(self, hints: Hints, text: str | None) -> Hints:
        """Return the same hints, with a guess if one is wanted. Never raises."""
        if self._head is None or text is None:
            return hints
        if hints.slo_class or hints.urgency != DEFAULT_URGENCY:
            return hints
        try:
            level = self._head.level(text)
        except Exception:
            if not self._num_failed:
                logger.exception("cannot guess how urgent a prompt is: it gets the default urgency")
            self._num_failed += 1
            return hints
        self._num_guessed[level] += 1
        return replace(hints, urgency=level)

    def stats(self) -> dict[str, Any]:
        """Return counters for /server_info, and UrgencyHead.confusion of the model."""
        by_level = {str(level): n for level, n in enumerate(self._num_guessed) if n}
        confusion = self._head.confusion if self._head else ()
        return {"num_guessed": by_level, "num_failed": self._num_failed, "confusion": confusion}
