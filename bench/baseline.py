"""What an unloaded and a saturated server do: the yardsticks of slowdown and of arrival rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.client import Answer


class UnloadedTime(NamedTuple):
    """Time to the last token of a request that is alone on the server:
    base_s + input tokens * per_input_token_s + output tokens * per_output_token_s."""

    base_s: float
    per_input_token_s: float
    per_output_token_s: float

    @classmethod
    def fitted(cls, answers: Sequence[Answer]) -> UnloadedTime:
        """From requests that were answered one at a time: least squares of the relative error,
        no coefficient below 0."""
        measured = np.array([answer.ttlt_s for answer in answers])
        terms = np.array([[1.0, a.input_tokens, a.output_tokens] for a in answers])
        coefficients = np.zeros(3)
        kept = [0, 1, 2]
        while kept:
            scaled = terms[:, kept] / measured[:, None]
            solution = np.linalg.lstsq(scaled, np.ones(measured.size), rcond=None)[0]
            if (solution >= 0).all():
                coefficients[kept] = solution
                break
            kept.pop(int(np.argmin(solution)))
        return cls(*coefficients.tolist())

    def slowdown(self, answer: Answer) -> float:
        """How many times as long the answer took."""
        return answer.ttlt_s / (
            self.base_s
            + answer.input_tokens * self.per_input_token_s
            + answer.output_tokens * self.per_output_token_s
        )


def saturated_rate(answers: Sequence[Answer]) -> float:
    """Requests/s that a server sustains, from a burst of requests that were sent all at once.

    Counted until the last request got its first token: up to then the server had a queue, after
    that it only drains. A request under way counts by the share of its decoding that was done.
    """
    full_until_s = max(answer.first_token_s for answer in answers)
    done = 0.0
    for answer in answers:
        decode_s = answer.last_token_s - answer.first_token_s
        if answer.last_token_s <= full_until_s:
            done += 1.0
        elif decode_s > 0:
            done += (full_until_s - answer.first_token_s) / decode_s
    return done / full_until_s
