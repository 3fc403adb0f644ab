"""When the next request of a session comes, and so whose KV is worth its memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

import numpy as np

from sage_sched.distribution import Floats
from sage_sched.index import gittins_index

# So many sessions are remembered; the one that has had no request for longest is forgotten first.
MOST_SESSIONS = 10_000
# The latest pauses, in classes by what was predicted of them; learned anew every so many.
_NUM_PAUSES, _NUM_CLASSES, _LEARNED_EVERY = 1024, 4, 64
# A session's own pauses count as much as this many of others, and the latest so many of them.
_OTHERS, _MOST_OWN = 4.0, 12
# An answer in so many is a session's last: coding agents take some forty steps. Twice or a third of
# it changes their mean time by less than a hundredth. For first answers the share is learned.
_LAST_ONE_IN = 33
# What is predicted of a session that has not come back yet: it is of a class of its own.
_FIRST = -math.inf
# Ages at which a table has an entry, in seconds.
_AGES = np.geomspace(0.25, 2000.0, 40)
_NEVER_S = 1e5


class SessionReturns:
    """A session's pauses, in which a tool runs or somebody reads, are a history too.

    What is predicted of a pause is the mean logarithm of the session's earlier ones, drawn to that
    of all, or what its client says. Pauses of which alike was predicted form a class. So do first
    pauses, since many chats end after one answer. Of a session of a class that has been away for t
    seconds, with T its pause, the rate is

        sup over D > t of P(T <= D | T > t) / E[min(T, D) - t | T > t]

    the most returns per second of keeping its KV, which is the inverse of a Gittins index. As what
    is lost has to be computed token by token, the KV of the smallest rate goes first, whatever its
    size. Until enough pauses are known the rate of all is 0.

    saw_any: whether any request was of a session.
    """

    def __init__(self) -> None:
        # In the order of their last requests: mean logarithm of a session's pauses, and how many.
        self._known: dict[str, tuple[float, int]] = {}
        self._unfinished: dict[str, int] = {}
        self._closed: set[str] = set()  # of these
        # Of those that are away: since when, and what is predicted.
        self._away: dict[str, tuple[float, float]] = {}
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_NUM_PAUSES)
        self._mean = 0.0
        self.saw_any = False
        self._num_pauses = 0
        # First answers, and those after which the session came back.
        self._num_first = self._num_second = 0
        self._cuts: list[float] = []
        self._rates: list[Floats] = []

    def came(self, session: str, now_s: float) -> None:
        self.saw_any = True
        self._unfinished[session] = self._unfinished.pop(session, 0) + 1
        self._closed.discard(session)
        if len(self._unfinished) > MOST_SESSIONS:  # nobody may have said that it ended
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            self._closed.discard(oldest)
        if session not in self._away:
            return
        since_s, predicted = self._away.pop(session)
        pause_s = max(now_s - since_s, float(_AGES[0]))
        mean, number = self._known.pop(session, (0.0, 0))
        number = min(number + 1, _MOST_OWN)
        self._known[session] = mean + (math.log(pause_s) - mean) / number, number
        if len(self._known) > MOST_SESSIONS:
            del self._known[next(iter(self._known))]
        self._num_second += predicted == _FIRST
        self._pauses.append((predicted, pause_s))
        self._num_pauses += 1
        self._mean += (math.log(pause_s) - self._mean) / min(self._num_pauses, _NUM_PAUSES)
        if self._num_pauses % _LEARNED_EVERY == 0:
            self._learn(now_s)

    def left(self, session: str, now_s: float, next_in_s: float | None = None) -> None:
        """An answer has ended. next_in_s: what its client says (Hints.next_in_s)."""
        self._unfinished[session] = self._unfinished.get(session, 1) - 1
        if self._unfinished[session]:
            return
        del self._unfinished[session]
        if session in self._closed:
            self._closed.discard(session)
            next_in_s = math.inf
        mean, number = self._known.get(session, (0.0, 0))
        predicted = (
            (number * mean + _OTHERS * self._mean) / (number + _OTHERS) if number else _FIRST
        )
        self._away.pop(session, None)
        if next_in_s is not None:
            predicted = math.log(max(next_in_s, float(_AGES[0])))
        self._num_first += predicted == _FIRST
        if predicted < math.inf:
            self._away[session] = now_s, predicted
        if len(self._away) > MOST_SESSIONS:
            del self._away[next(iter(self._away))]

    def closed(self, session: str) -> None:
        """Its client says that it does not come back, after what is unfinished of it."""
        self._away.pop(session, None)
        if session in self._unfinished:
            self._closed.add(session)

    def rate(self, session: str, now_s: float) -> float:
        """Returns per second, see the class; inf for one that has come back, 0 if unknown."""
        if session in self._unfinished:
            return math.inf
        if session not in self._away or not self._rates:
            return 0.0
        since_s, predicted = self._away[session]
        age = min(max(0, int(np.searchsorted(_AGES, now_s - since_s)) - 1), len(_AGES) - 1)
        return float(self._rates[bisect_left(self._cuts, predicted)][age])

    @property
    def knows(self) -> bool:
        """Whether enough pauses are known."""
        return bool(self._rates)

    def _learn(self, now_s: float) -> None:
        predicted, pauses_s = np.array(self._pauses).T
        later = predicted[predicted > _FIRST]
        shares = np.arange(1, _NUM_CLASSES) / _NUM_CLASSES
        self._cuts = [_FIRST, *np.quantile(later, shares).tolist()] if later.size else [_FIRST]
        classes = np.searchsorted(self._cuts, predicted)
        found = [pauses_s[classes == number] for number in range(len(self._cuts) + 1)]
        lasts = [self._last_one_in(now_s, found[0]), *[_LAST_ONE_IN] * len(self._cuts)]
        self._rates = [
            np.fromiter(_rates(of_class if of_class.size else pauses_s, last), float)
            for of_class, last in zip(found, lasts, strict=True)
        ]

    def _last_one_in(self, now_s: float, pauses_s: Floats) -> float:
        """One first answer in so many is its session's last. pauses_s: after first answers. Of
        those that have been away for less than most of these, nothing is known yet. Old counts
        fade."""
        least_s = now_s - float(np.quantile(pauses_s, 0.95)) if pauses_s.size else now_s
        pending = sum(f == _FIRST and since_s > least_s for since_s, f in self._away.values())
        num_known = max(self._num_first - pending, self._num_second)
        num_second = self._num_second
        if self._num_first > 2 * _NUM_PAUSES:
            self._num_first, self._num_second = self._num_first // 2, num_second // 2
        return (_LAST_ONE_IN + num_known) / (1 + num_known - num_second)


def _rates(pauses_s: Floats, last_one_in: float) -> Iterator[float]:
    """At each of _AGES."""
    ends_s = np.append(np.sort(pauses_s), _NEVER_S)
    weights = np.append(np.full(len(pauses_s), (last_one_in - 1) / len(pauses_s)), 1.0)
    for age_s in _AGES:
        later = ends_s > age_s
        yield 1.0 / float(gittins_index(weights[later], ends_s[later] - age_s))
