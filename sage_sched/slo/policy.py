"""Implements ProServe, which serves requests with deadlines and priorities in one queue, by
SlideBatching. Requests without an SLO follow by their Gittins indices."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.index import Indices
from sage_sched.job import Entry, Group, Job
from sage_sched.plan import Budget, NextPlan
from sage_sched.policy import Policy, Traits
from sage_sched.session_returns import SessionReturns
from sage_sched.slo.deadlines import Deadlines
from sage_sched.slo.slide import STARVED, Queue, Slide, StarvedShare, keys
from sage_sched.slo.slo_state import (
    DENSITY,
    NEVER,
    Pair,
    SloState,
    Waiting,
    Worth,
    columns_of,
    slo_state_of,
    slo_states_of,
)
from sage_sched.steps import FEW_CUTS, ServerFacts, least_bound_s, seconds_on
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import MovingKeys, WaitingQueue

# The longest batch that can be configured, in TPOTs.
_MOST_TPOTS = 1000.0
# The least time of a next token. It would be 0 if a server's steps took the same time for any
# batch.
_LEAST_EXEC_S = 1e-9
# The longest batch with density "expected", as a share of the TPOT of running jobs that are late
# and whose answers still have an expected gain.
_CATCH_UP = 0.8
# The shortest batch, as a share of the smallest TPOT, while prefills gain more (_eta). Longer
# batches miss more deadlines than they save work: chosen on tuning seeds of `bench run slo`.
_ETA_OF_PREFILLS = 3.0
# A batch prefills at least this many tokens, or none while other jobs run.
_LEAST_CHUNK_TOKENS = 50


@dataclass(frozen=True, slots=True)
class ProserveParameters:
    """Settings of proserve. Details that the paper leaves open are as in xLLM, unless said
    otherwise."""

    eta: Annotated[float, Meta(ge=0, le=_MOST_TPOTS)] = 0.65
    """The least time of a batch, as a share of the smallest TPOT deadline."""
    density: Literal["next", "expected"] = "next"
    """Jobs are ordered by worth per second: of the `next` token (the paper) or of the `expected`
    answer (ours)."""
    starved_share: Annotated[float, Meta(ge=0, lt=1)] = 0.02
    """Share of the work for jobs that have waited for twice their TTFT deadline; as large a share
    for jobs without one."""


class Proserve(Policy):
    """SlideBatching (ProServe, section 4.2): orders running and waiting jobs as one queue.

    Urgent jobs are ordered by density and the others by deadline. The batch lasts until the first
    deadline of a token that can be in time. With density "expected" all jobs are ordered by
    density.

    All running jobs get a token in each decode step. That is SGLang's way, and leaving some out
    would save little (their KV is not read, but the weights are read anyway). So the order decides
    which job is prefilled next and which is preempted. The budget decides how much is prefilled
    together with the running jobs or, on a server that does not mix steps, before their next
    tokens.

    Jobs without an SLO go behind all others, by their Gittins indices. A TTFT target as under
    `sage` would start them at the expense of SLOs.
    """

    Parameters = ProserveParameters
    traits = Traits(
        has_deadlines=True,
        predicts_waits=True,
        retention=SessionReturns,
        starts_within_s=math.inf,
        moving=lambda policy: _WithSlo(policy),
    )

    def __init__(self, parameters: ProserveParameters, server: ServerFacts) -> None:
        self._indices = Indices(server)
        super().__init__(parameters, server, self._indices)
        self._slo_cost = seconds_on(_shared_base(server))
        self._waiting = Waiting()
        # Waiting jobs without an SLO and without a token, by arrival.
        self._patient: list[tuple[int, Job]] = []
        self._budget: Budget | None = None
        share, self._pool_tokens = parameters.starved_share, float(server.kv_pool_tokens)
        self._starved = [
            StarvedShare(share, self._pool_tokens, is_starved)
            for is_starved in (self._is_late, self._waits_long)
        ]

    def rank(self, job: Job) -> None:
        super().rank(job)
        if not job.hints.has_slo:
            return
        if (state := slo_state_of(job)) is None:
            deadlines = Deadlines.of(job.hints)
            job.memo = SloState(deadlines, self._worth(job), self._prefill_s(job))
            return
        state.worth, state.exec_s = self._worth(job), self._prefill_s(job)
        state.looked_at = NEVER
        if state.column is not None:
            self._bring_up_to_date(job, state, has_begun=False)
            self._waiting.update(job, state)

    def on_server(self, server: ServerFacts) -> None:
        super().on_server(server)
        self._slo_cost = seconds_on(_shared_base(server))

    def _worth(self, job: Job) -> Worth:
        known = job.distribution.with_tail(job.max_new_tokens)
        return Worth.of(known, self._slo_cost, job.input_tokens, job.cached_input_tokens)

    def _prefill_s(self, job: Job) -> float:
        """Return the seconds to prefill the rest of the job's prompt, without the fixed time of a
        step."""
        done = max(job.cached_tokens, job.prefilled_tokens)
        new_tokens = max(1, job.input_tokens + job.generated_tokens - done)
        return max(_LEAST_EXEC_S, float(self.server.step_time.prompt_s(done, new_tokens)))

    def _came(self, job: Job) -> None:
        if (state := slo_state_of(job)) is not None:
            self._bring_up_to_date(job, state, has_begun=False)
            self._waiting.add(job, state)
        elif not job.generated_tokens:
            insort(self._patient, (job.arrival, job))

    def _left(self, job: Job) -> None:
        if (state := slo_state_of(job)) is not None and state.column is not None:
            self._waiting.remove(state)
            return
        place = bisect_left(self._patient, (job.arrival,))
        if place < len(self._patient) and self._patient[place][1] is job:
            del self._patient[place]

    def _is_starved(self, job: Job) -> bool:
        return any(starved.first is job for starved in self._starved)

    def key(self, job: Job, view: SchedulerView) -> float:
        if self._is_starved(job):
            return STARVED
        state = slo_state_of(job)
        if state is None:
            return self._indices.of(job).log_index
        return state.key if state.column is None else float(self._waiting.key[state.column])

    def on_pass(self, view: SchedulerView, queue: WaitingQueue) -> NextPlan:
        """Order all jobs, and decide how long the batch may take."""
        for job in queue.left:
            self._left(job)
        for job in queue.came:
            self._came(job)
        running, chunked = slo_states_of(view.running), slo_states_of(view.chunked_jobs)
        self._budget = None
        for job, p in (*running, *chunked):
            self._bring_up_to_date(job, p, has_begun=True)
        if running or chunked or self._waiting.jobs:
            self._order([*running, *chunked], len(running), view)
        late = self._waiting.late(view.now_s)
        patient = takewhile(partial(self._waits_long, view=view), (job for _, job in self._patient))
        for starved, candidates in zip(self._starved, (late, patient), strict=True):
            for pick in (starved.first, starved.choose(candidates, view, queue)):
                if pick is not None:  # the previous pick, and this pass's
                    pick.changes()
        return NextPlan()

    def _is_late(self, job: Job, view: SchedulerView) -> bool:
        p = slo_state_of(job)
        return p is not None and view.now_s > p.due_s + p.deadlines.ttft_s

    def _waits_long(self, job: Job, view: SchedulerView) -> bool:
        waited_tokens = view.served_tokens - job.served_at_arrival_tokens
        return slo_state_of(job) is None and waited_tokens > self._pool_tokens

    def _bring_up_to_date(self, job: Job, state: SloState, *, has_begun: bool) -> None:
        """Set the deadline of the job's next token, and the seconds that the token takes.

        has_begun: whether the job runs or is being prefilled.
        """
        deadlines, age = state.deadlines, job.generated_tokens
        if age:
            step_time = self.server.step_time
            kv_tokens = job.input_tokens + age
            decode_s = step_time.decode_request_s + kv_tokens * step_time.decode_kv_token_s
            state.due_s = job.arrival_s + deadlines.due_s(age + 1)
            state.exec_s = max(_LEAST_EXEC_S, decode_s)
        else:
            state.due_s = job.arrival_s + deadlines.ttft_s
            if has_begun:
                state.exec_s = self._prefill_s(job)
        if self.parameters.density == "next":
            weight = deadlines.next_weight if age else deadlines.first_weight
            state.density = weight / state.exec_s

    def _order(self, begun: list[Pair], num_running: int, view: SchedulerView) -> None:
        """Order all jobs with an SLO. The first num_running of begun run."""
        step_time, ours, waiting = self.server.step_time, self.parameters, self._waiting
        exec_s, due_s, tpot_s, density, looked_at = np.concatenate(
            [columns_of(begun), waiting.columns], axis=1
        )
        remain_s = due_s - view.now_s
        fixed_s = max(step_time.prefill_base_s, step_time.decode_base_s)
        missing_s = exec_s + fixed_s - remain_s
        step_s = step_time.decode_s(len(view.running), view.running_kv_tokens)
        if ours.density == "expected":
            # In each decode step, a late job catches up by its TPOT less the step's time. Prefills
            # are cut to allow that (_CATCH_UP).
            catching_s = np.clip(tpot_s - step_s, 1e-6, 1e6)  # tpot_s may be inf
            waiting.look(begun, num_running, missing_s / catching_s, looked_at, self._slo_cost)
            density = np.append([p.density for _, p in begun], waiting.columns[DENSITY])
        queue = Queue(exec_s, remain_s, density)
        eta = self._eta(begun, remain_s, num_running, step_s)
        least_s = eta * min(float(tpot_s.min()), 1e6)
        if view.running and not self.server.mixes_steps:
            least_s = max(least_s, least_bound_s(step_s, step_time, FEW_CUTS))
        slide = Slide(fixed_s, least_s)
        budget_s = slide.budget_s(queue)
        if ours.density == "expected":
            behind = (missing_s > 0) & (queue.density > 0)
            behind[num_running:] = False
            if behind.any():
                budget_s = max(min(budget_s, _CATCH_UP * float(tpot_s[behind].min())), least_s)
        urgent = slide.is_urgent(queue, budget_s)
        found = keys(queue, self._by_density(urgent))
        for (_, p), key, is_urgent in zip(begun, found.tolist(), urgent.tolist(), strict=False):
            p.key, p.is_urgent = key, is_urgent
        waiting.key[:], waiting.urgent[:] = found[len(begun) :], urgent[len(begun) :]
        self._budget = self._in_tokens(budget_s, view)

    def _by_density(self, urgent: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which jobs are ordered by density. With density "expected" all are: next tokens do
        not show whether there is time for the whole answers of all other jobs first."""
        return np.ones_like(urgent) if self.parameters.density == "expected" else urgent

    def _eta(self, begun: list[Pair], remain_s: Floats, num_running: int, step_s: float) -> float:
        """Return the shortest batch, as a share of the smallest TPOT. This rule is ours.

        Every batch has a decode step in it, which takes step_s, so short batches prefill little.
        Batches are longer if step_s seconds of prefill gain more in first tokens than all running
        jobs in time gain by their next tokens.
        """
        eta: float = self.parameters.eta
        chunked = [p for job, p in begun[num_running:] if not job.generated_tokens]
        first_weights, first_s = self._waiting.first_tokens()
        first_s += sum(p.exec_s for p in chunked)
        if num_running and first_s:
            first_weights += sum(p.deadlines.first_weight for p in chunked)
            next_weights = np.array([p.deadlines.next_weight for _, p in begun[:num_running]])
            bought = step_s * first_weights / first_s
            if bought > next_weights[remain_s[:num_running] >= step_s].sum():
                return max(eta, _ETA_OF_PREFILLS)
        return eta

    def _in_tokens(self, budget_s: float, view: SchedulerView) -> Budget | None:
        """Return how much may be prefilled within a batch of budget_s seconds, by the model of step
        times."""
        if budget_s == math.inf:
            return None
        running = len(view.running), view.running_kv_tokens
        left_s = budget_s - (self.server.decode_beside_s(*running) if view.running else 0.0)
        num_done = sum(job.prefilled_tokens for job in view.chunked_jobs)
        within = self.server.step_time.tokens_within(left_s, num_done)
        if within >= view.pass_tokens:
            return None
        tokens = int(within)
        if tokens < _LEAST_CHUNK_TOKENS:
            # If any job runs, a token is due before such a chunk ends.
            tokens = 0 if view.running else _LEAST_CHUNK_TOKENS
        return Budget(prefill_tokens=tokens)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """Preempt a job without an SLO for an urgent job with one. A job with an SLO is never
        preempted: a job preempted in time is late when it resumes. (With such preemptions, 1.2 to
        1.3 times as many jobs were late on decode servers as under fcfs, and without them 0.9 to
        1.0: `bench run apart-slo`.)"""
        theirs = slo_state_of(waiting)
        if slo_state_of(running) is not None or theirs is None:
            return False
        return (
            theirs.is_urgent if theirs.column is None else bool(self._waiting.urgent[theirs.column])
        )

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        return self._budget


class _WithSlo(MovingKeys):
    """The waiting jobs with an SLO. Jobs that starve keep their place."""

    def __init__(self, policy: Proserve) -> None:
        super().__init__(policy)
        self._waiting, self._starved = policy._waiting, policy._starved

    def has(self, job: Job) -> bool:
        is_pick = any(starved.first is job for starved in self._starved)
        state = slo_state_of(job)
        return state is not None and state.column is not None and not is_pick

    def first(self, jobs: Collection[Job], num: int, view: SchedulerView) -> list[Entry]:
        waiting, picks = self._waiting, self._picks()
        # Jobs that go first, or starve, are not among `jobs`.
        entries = waiting.first(num + len(waiting.jobs) - len(jobs))
        return [entry for entry in entries if not entry[3].goes_first and entry[3] not in picks]

    def groups(self, jobs: Collection[Job], view: SchedulerView) -> dict[Group, Iterator[Entry]]:
        return self._waiting.groups(self._picks())

    def _picks(self) -> set[Job | None]:
        return {starved.first for starved in self._starved}


def _shared_base(server: ServerFacts) -> ServerFacts:
    """Return facts in which a prefill together with decoding jobs reads no weights of its own."""
    if not server.mixes_steps:
        return server
    return replace(server, step_time=replace(server.step_time, prefill_base_s=0.0))
