"""Decides whether the predicted times by which requests are refused can be trusted."""

from __future__ import annotations

from collections import deque

# Over this many answers, real times are compared with predicted ones.
NUM_COMPARED = 64
# Refusing stops while answers take less than LEAST of their predicted times: a server whose step
# times are ten times too long has 0.1. It begins again at AGAIN. With right step times 64 answers
# took 0.44 to 1.7 of theirs at twice the capacity.
LEAST, AGAIN = 0.33, 0.45
_NUM_SAMPLED = 50


class Trust:
    """Compares the predicted times of admitted requests with the real ones.

    is_lost: whether predicted times are far too long, so that no request is refused.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._both = deque[tuple[float, float]](maxlen=NUM_COMPARED)
        self._sampled = deque[bool](maxlen=_NUM_SAMPLED)

    def answered(
        self, real_s: float, predicted_s: float, due_s: float, *, was_sampled: bool
    ) -> None:
        """Note the time until a request's last token: real, predicted, and by its deadline.

        was_sampled: whether it is one of the few that are admitted although their predicted times
            are too long.
        """
        self._both.append((real_s, predicted_s))
        if was_sampled:
            self._sampled.append(real_s <= due_s)
        if len(self._both) == NUM_COMPARED:
            ratio = sum(real for real, _ in self._both) / sum(both[1] for both in self._both)
            self.is_lost = ratio < (AGAIN if self.is_lost else LEAST)

    @property
    def good_share(self) -> float | None:
        """The share of the latest sampled requests that were in time after all; None if none was
        sampled. Each of them gains by the refusal of all others, so a server that refuses none
        would answer a smaller share in time."""
        return sum(self._sampled) / len(self._sampled) if self._sampled else None
