"""Orders requests as schedulers for agents' programs do. A session is a program here.

All of them fill memory as ours do, and none needs a prediction.
"""

from __future__ import annotations

import math
from collections import defaultdict

from sage_sched.job import Job
from sage_sched.policy import NoParameters, Policy, Traits
from sage_sched.session_returns import SessionReturns
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import MovingKeys

# The time-to-live of Continuum. The paper derives it from the durations of tool calls. This is the
# best of 6, 12 and 30 s on the tuning half of the recorded sessions.
_TTL_S = 30.0
# The rate of an absent session: low enough that admission sets no room aside for its KV. If it did,
# sessions would take twice the time.
_LITTLE = 1e-6
# An absent session counts as running for this long (ThunderAgent): the better of 10 and 30 s.
_AWAY_S = 10.0


class Attained(Policy):
    """Serves the session with the least service first (Autellix, arXiv 2502.13965)."""

    def __init__(self, parameters: NoParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self._served_tokens: dict[str, int] = defaultdict(int)

    def on_end(self, job: Job, now_s: float) -> None:
        self._served_tokens[job.hints.session] += job.served_tokens

    def key(self, job: Job, view: SchedulerView) -> float:
        return float(self._served_tokens[job.hints.session] + job.served_tokens)

    traits = Traits(moving=MovingKeys)


class _TimeToLive(SessionReturns):
    """Keeps a session's KV for a fixed time."""

    knows = True

    def __init__(self) -> None:
        super().__init__()
        self._ended_s: dict[str, float] = {}

    def came(self, session: str, now_s: float) -> None:
        self._ended_s.pop(session, None)

    def left(self, session: str, now_s: float, *_: object, **__: object) -> None:
        self._ended_s[session] = now_s

    def rate(self, session: str, now_s: float) -> float:
        if session not in self._ended_s:
            return math.inf if session else 0.0
        return _LITTLE if now_s - self._ended_s[session] < _TTL_S else 0.0


class Continuum(Policy):
    """Serves sessions in the order in which they began. A session's KV is kept for a while after an
    answer (Continuum, arXiv 2511.02230)."""

    traits = Traits(retention=_TimeToLive)

    def __init__(self, parameters: NoParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self._began: dict[str, int] = {}

    def rank(self, job: Job) -> None:
        self._began.setdefault(job.hints.session, job.arrival)

    def key(self, job: Job, view: SchedulerView) -> float:
        return float(self._began[job.hints.session])


class ThunderAgent(Policy):
    """Admits sessions in the order in which they began, while all of their KV fits. Other sessions
    pause (ThunderAgent, arXiv 2602.13692)."""

    traits = Traits(moving=MovingKeys)

    def __init__(self, parameters: NoParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        # By start: each session's KV in tokens, and since when it has been absent.
        self._sessions: dict[str, tuple[int, float]] = {}

    def rank(self, job: Job) -> None:
        self._sessions[job.hints.session] = job.input_tokens, math.inf

    def on_end(self, job: Job, now_s: float) -> None:
        self._sessions[job.hints.session] = job.input_tokens + job.generated_tokens, now_s

    def key(self, job: Job, view: SchedulerView) -> float:
        ahead = 0
        for session, (num_tokens, since_s) in self._sessions.items():
            ahead += num_tokens if view.now_s - since_s < _AWAY_S else 0
            if session == job.hints.session:
                break
        return float(job.arrival) if ahead <= self.server.kv_pool_tokens else math.inf


RIVALS = {"attained": Attained, "continuum": Continuum, "thunder-agent": ThunderAgent}
