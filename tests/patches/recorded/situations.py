"""Situations of a scheduler: what makes each of them special, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.patches.recorded.asks import Ask, Make, Script, abort, change


@dataclass(frozen=True, slots=True)
class Situation:
    """A server with these flags, settings and environment, and what it is sent.

    sent: what is sent at which turn of the scheduler's loop.
    """

    policy: str
    sent: Iterable[tuple[int, Make]]
    flags: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def script(self) -> Script:
        script: Script = {}
        for turn, make in self.sent:
            script.setdefault(turn, []).append(make)
        return script


def _crowd(
    number: int, *, every: int = 2, vary: Callable[[int], Mapping[str, Any]] = lambda n: {}
) -> list[tuple[int, Make]]:
    """Requests of many lengths, one at every so many turns. A ninth of them have no prediction, a
    fifth a wrong one. vary: other fields of the n-th Ask."""
    asks = []
    for n in range(number):
        answer_tokens = 2 + n * n % 47
        expected = 60 - answer_tokens if n % 5 == 4 else answer_tokens
        lengths = [] if n % 9 == 8 else [1 + expected // 2, expected, 1 + 2 * expected]
        ask = Ask(n, 10 + 37 * n % 90, answer_tokens, lengths, n % 3, 8)
        asks.append((1 + every * n, replace(ask, **vary(n))))
    return asks


_STARVED = ("--max-total-tokens", "500", "--max-running-requests", "12")

SITUATIONS = {
    "starved": Situation(
        "sage",
        [*_crowd(60), (30, abort("r3")), (60, abort("r20")), (61, abort("r24"))],
        [*_STARVED],
    ),
    "switched": Situation(
        "sage",
        [
            *_crowd(60),
            (40, change(schedule_policy="fcfs")),
            (90, change(schedule_policy="urgency")),
        ],
        [*_STARVED, "--disable-overlap-schedule"],
    ),
}  # fmt: skip
