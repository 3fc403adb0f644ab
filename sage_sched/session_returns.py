"""Predicts when a session's next request comes, and so which sessions' KV is worth its memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

import numpy as np

from sage_sched.distribution import Floats
from sage_sched.index import gittins_index
from sage_sched.job import Job
from sage_sched.limit import Limit

# At most this many sessions are remembered. The session without a request for longest is forgotten
# first.
MOST_SESSIONS = 10_000
# The number of latest pauses that are kept, of classes into which predictions fall, and of pauses
# between two updates of the tables.
_NUM_PAUSES, _NUM_CLASSES, _LEARNED_EVERY = 1024, 4, 64
# A prediction weighs the session's own pauses, which count as _MOST_OWN at most, against the mean
# of all sessions, which counts as _OTHERS pauses.
_OTHERS, _MOST_OWN = 4.0, 12
# One answer in 33 ends its session, because coding agents take some forty steps. Twice or a third
# of this value changes their mean time by less than a hundredth. For first answers the share is
# learned.
_LAST_ONE_IN = 33
# The prediction for a session that has not come back yet. It forms a class of its own.
_FIRST = -math.inf
# Ages in seconds at which a table has an entry.
_AGES = np.geomspace(0.25, 2000.0, 40)
_NEVER_S = 1e5


class SessionReturns(Limit):
    """Predicts a session's pauses, in which a tool runs or a user reads, from earlier pauses.

    The prediction for a pause is the mean logarithm of the session's earlier pauses, drawn towards
    the mean of all sessions. If the client says how long the pause will be, that is the prediction.
    Pauses with similar predictions share a class. First pauses have a class of their own, because
    many chats end after one answer. For a session that has been away for t seconds, with T its
    pause, the class gives the rate

        sup over D > t of P(T <= D | T > t) / E[min(T, D) - t | T > t]

    This is the most returns per second of keeping the session's KV, the inverse of a Gittins index.
    Lost KV has to be computed token by token, so KV with the smallest rate is evicted first,
    whatever its size. Until enough pauses are known, every rate is 0.
    """

    def __init__(self) -> None:
        # The mean logarithm of each session's pauses, and their number, in the order of the
        # sessions' last requests.
        self._known: dict[str, tuple[float, int]] = {}
        self._unfinished: dict[str, int] = {}
        self._closed: set[str] = set()  # sessions in _unfinished that do not return
        # For each session that is away: since when, the prediction for its pause, and whether it
        # left with an answer. Otherwise it waits to be admitted, which says nothing of its pauses.
        self._paused: dict[str, tuple[float, float, bool]] = {}
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_NUM_PAUSES)
        self._mean = 0.0
        self.is_engaged = False
        self._num_pauses = 0
        # The number of first answers, and of those after which the session came back.
        self._num_first = self._num_second = 0
        self._cuts: list[float] = []
        self._rates: list[Floats] = []

    def concerns(self, job: Job) -> bool:
        return bool(job.hints.session)

    def arrived(self, job: Job) -> None:
        if job.hints.session:
            self.came(job.hints.session, job.arrival_s)

    def ended(self, job: Job, now_s: float) -> None:
        if job.hints.session:
            # The claims of the others are about a time after an answer.
            was_answered = job.generated_tokens > 0
            next_in_s = job.hints.next_in_s if was_answered else None
            self.left(job.hints.session, now_s, next_in_s, was_answered=was_answered)

    def came(self, session: str, now_s: float) -> None:
        self._unfinished[session] = self._unfinished.pop(session, 0) + 1
        self._closed.discard(session)
        if len(self._unfinished) > MOST_SESSIONS:  # some clients never say that a session ended
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            self._closed.discard(oldest)
        if session not in self._paused:
            return
        since_s, predicted, was_answered = self._paused.pop(session)
        if not was_answered:
            return
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

    def left(
        self,
        session: str,
        now_s: float,
        next_in_s: float | None = None,
        *,
        was_answered: bool = True,
    ) -> None:
        """Note that a request has ended.

        next_in_s: how long after its answer the next one comes, as its client says
            (Hints.next_in_s).
        was_answered: whether it had an answer, and was not refused.
        """
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
        self._paused.pop(session, None)
        if next_in_s is not None:
            predicted = math.log(max(next_in_s, float(_AGES[0])))
        self._num_first += was_answered and predicted == _FIRST
        if predicted < math.inf:
            self._paused[session] = now_s, predicted, was_answered
        if len(self._paused) > MOST_SESSIONS:
            del self._paused[next(iter(self._paused))]

    def closed(self, session: str) -> None:
        """Note that the session ends with its unfinished requests, as its client says."""
        self._paused.pop(session, None)
        if session in self._unfinished:
            self._closed.add(session)

    def rate(self, session: str, now_s: float) -> float:
        """Return the rate of the session's returns per second (see the class): inf if it has come
        back, 0 if unknown."""
        if session in self._unfinished:
            return math.inf
        if session not in self._paused or not self._rates:
            return 0.0
        since_s, predicted, _ = self._paused[session]
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
        """Return n such that one first answer in n ends its session.

        pauses_s: after first answers. Sessions that have been away for less than most of these
        pauses are not counted yet. Old counts fade.
        """
        least_s = now_s - float(np.quantile(pauses_s, 0.95)) if pauses_s.size else now_s
        pending = sum(
            was_answered and predicted == _FIRST and since_s > least_s
            for since_s, predicted, was_answered in self._paused.values()
        )
        num_known = max(self._num_first - pending, self._num_second)
        num_second = self._num_second
        if self._num_first > 2 * _NUM_PAUSES:
            self._num_first, self._num_second = self._num_first // 2, num_second // 2
        return (_LAST_ONE_IN + num_known) / (1 + num_known - num_second)


def _rates(pauses_s: Floats, last_one_in: float) -> Iterator[float]:
    """Yield the rate at each of _AGES."""
    ends_s = np.append(np.sort(pauses_s), _NEVER_S)
    weights = np.append(np.full(len(pauses_s), (last_one_in - 1) / len(pauses_s)), 1.0)
    for age_s in _AGES:
        later = ends_s > age_s
        yield 1.0 / float(gittins_index(weights[later], ends_s[later] - age_s))
