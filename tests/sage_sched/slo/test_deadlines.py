"""The worth of tokens on time, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sage_sched.job import Hints
from sage_sched.slo import Deadlines


def gained(promise: Deadlines, token_s: Sequence[float]) -> float:
    """The worth of an answer with tokens at these times after its arrival (eq. 3)."""
    on_time = [seconds <= promise.due_s(token) for token, seconds in enumerate(token_s, 1)]
    return promise.gained(on_time[0], sum(on_time[1:]))


def test_gain_by_hand() -> None:
    # Two tokens are early, one is late, one has caught up.
    token_s = [0.5, 1.05, 1.25, 1.3]
    buffered = Deadlines(1.0, 0.1, first_weight=10.0, next_weight=2.0)
    assert gained(buffered, token_s) == 10 + 2 * 2
    assert buffered.ideal(4) == 10 + 3 * 2
    # The first late, the second on time.
    assert gained(buffered, [2.0, 1.0 + 0.1]) == 2.0


def test_a_promise_is_what_hints_say() -> None:
    hints = Hints(weight=3.0, ttft_slo_ms=250.0, first_token_weight=4.0)
    assert Deadlines.of(hints) == Deadlines(0.25, math.inf, 12.0, 3.0)
    assert gained(Deadlines.of(Hints()), [1e9, 2e9]) == 2.0
