"""Makes requests of two kinds with synthetic lengths. One kind waits behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.simulator.request import SimRequest
from bench.workloads.source import Draw, Source
from sage_sched.distribution import LengthDistribution
from sage_sched.job import DEFAULT_URGENCY, Hints

LS_URGENCY = 2
_LS_ANSWER_TOKENS = 32
_MEDIAN_ANSWER_TOKENS, _SPREAD_OF_LOG, _MOST_ANSWER_TOKENS = 100, 0.8, 1_024


class TwoKinds(Source):
    """A share of short prompts among long ones, all different.

    sensitive: the short ones are latency-sensitive (LS) and the others best effort (BE), and
        answers have 32 tokens. If not, all are equally urgent (classes "short" and "long"), with
        log-normal answers. Servers do not know the length of an answer.
    """

    def __init__(
        self,
        *,
        short_share: float = 0.2,
        short_tokens: Sequence[int] = (20, 60),
        long_tokens: Sequence[int] = (2_000, 3_500),
        sensitive: bool = True,
    ) -> None:
        self._share = short_share
        self._tokens = short_tokens, long_tokens
        self._sensitive = sensitive

    def requests(self, draw: Draw) -> list[SimRequest]:
        rng = np.random.default_rng([draw.seed, 9])
        is_short = rng.random(draw.number) < self._share
        ends = np.where(is_short[:, np.newaxis], *self._tokens)
        input_tokens = rng.integers(ends[:, 0], ends[:, 1] + 1)
        number = draw.number
        answers = np.full(number, _LS_ANSWER_TOKENS) if self._sensitive else _spread(rng, number)
        names = ("LS", "BE") if self._sensitive else ("short", "long")
        is_urgent = is_short & self._sensitive
        return [
            SimRequest(
                arrival_s=float(at),
                input_tokens=int(num_in),
                output_tokens=int(num_out),
                max_new_tokens=draw.cap,
                distribution=self.all_answers(),
                class_name=names[0] if short else names[1],
                hints=Hints(urgency=LS_URGENCY if urgent else DEFAULT_URGENCY),
            )
            for at, num_in, num_out, short, urgent in zip(
                draw.arrivals_s, input_tokens, answers, is_short, is_urgent, strict=True
            )
        ]

    def all_answers(self) -> LengthDistribution:
        if self._sensitive:
            return LengthDistribution.from_samples([16, 32, 64], "history")
        return LengthDistribution.from_samples(_spread(np.random.default_rng(0), 200), "history")


def _spread(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
    lengths = rng.lognormal(np.log(_MEDIAN_ANSWER_TOKENS), _SPREAD_OF_LOG, number)
    return np.clip(np.rint(lengths), 1, _MOST_ANSWER_TOKENS).astype(np.int64)
