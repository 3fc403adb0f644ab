"""Simulates one engine in time."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

import numpy as np

from bench.policies.srpt_oracle import SrptOracle
from bench.simulator import slices
from bench.simulator.decode import Pace, num_on_time
from bench.simulator.executor import PlannedEngine, scheduling_pass
from bench.simulator.prefill_adder import Part, PassResult
from bench.simulator.presets import Engine
from bench.simulator.request import PAUSE_S, Progress, SimRequest
from bench.simulator.state import Options
from bench.simulator.stock import StockPolicy
from sage_sched.app.config import SageConfig
from sage_sched.distribution import UNKNOWN, LengthDistribution
from sage_sched.gaps import GAPS_PER_S
from sage_sched.job import Job
from sage_sched.overload.work import unfilled_tokens
from sage_sched.policy import Policy
from sage_sched.slo import Deadlines
from sage_sched.steps import attended_pairs


class Node:
    """Simulates SGLang's event loop without overlap: it receives requests, makes a pass and runs a
    step.

    Decode steps without an event between them are taken in one leap. Preemption is decided at every
    event, and whenever the age of a running request reaches a refresh boundary. on_finish is called
    with each request that has its last token.

    Two things differ from SGLang. Without overlap of scheduling and compute, a finish is known a
    step sooner. The request id, a tie-break of hrrn, is the arrival number.
    """

    State: ClassVar[type[PlannedEngine]] = PlannedEngine

    def __init__(
        self,
        engine: Engine,
        policy: Policy | StockPolicy,
        config: SageConfig,
        options: Options,
        on_finish: Callable[[Progress], None],
    ) -> None:
        self.state = self.State(engine, policy, config, options)
        self.num_outstanding = 0
        self.prefill_tokens = 0
        self.moved_tokens = 0
        self.refused: list[int] = []
        # How often each gap between two tokens came, over all requests, in 1/GAPS_PER_S.
        self.gaps: Counter[int] = Counter()
        self._policy = policy
        self._result = PassResult()  # of the latest pass
        self._options = options
        self._on_finish = on_finish
        self._delay_s = 0.0 if isinstance(policy, StockPolicy) else options.prediction_delay_s
        self._coming: list[tuple[float, int, SimRequest]] = []  # a heap

    @property
    def now_s(self) -> float:
        return self.state.core.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.state.core.now_s = now_s

    def submit(self, request: SimRequest, index: int, at_s: float | None = None) -> None:
        """Accept a request that is on its way. at_s: when it reaches this node, if not at its
        arrival."""
        comes_s = request.arrival_s if at_s is None else at_s
        heapq.heappush(self._coming, (comes_s + self._delay_s, index, request))
        self.num_outstanding += 1

    def switch_to(self, policy: Policy) -> None:
        """Switch to another policy, as `sage-sched set` does."""
        self._policy = policy
        self.state.follow(policy)

    def advance(self, until_s: float) -> None:
        """Advance to the end of the first step that ends at until_s or later, or until idle."""
        state = self.state
        while self.now_s < until_s:
            if not state.has_work:
                if not self._coming or self._coming[0][0] >= until_s:
                    return
                self.now_s = max(self.now_s, self._coming[0][0])
                state.ratio.reset()
            self._receive()
            state.now_s = self.now_s
            watch = self._options.watch
            before = [*state.queue] if watch else []
            result = self._result = scheduling_pass(state)
            self._end_lost()
            after = [*state.queue] if watch else []
            self._move(result.moved_tokens + state.pool.tree.take_waited(), result.num_moves)
            if result.parts:
                self._prefill(result.parts)
            elif len(state.decode):
                self._decode(until_s)
            elif not state.returning:
                raise RuntimeError("requests wait, but none can be admitted")
            if watch:
                watch(state, before, after, self.num_outstanding - len(self._coming))

    def next_change_s(self) -> float:
        """Return a time before which no request ends and no decision changes, unless a request
        arrives."""
        state = self.state
        if not state.has_work:
            return max(self.now_s, self._coming[0][0]) if self._coming else math.inf
        if self._coming or state.chunked or state.returning or not len(state.decode):
            return self.now_s
        if len(state.queue) and not (state.is_full and not state.can_swap):
            return self.now_s
        steps = min(
            state.decode.steps_that_fit(state.pool.room_pages), state.decode.steps_to_finish()
        )
        return self.now_s + state.decode.pace(state.engine.step_time).seconds(max(steps, 1))

    def ages(self) -> dict[Hashable, int]:
        """Return the number of generated tokens of each request that is here or on its way, by
        index."""
        state = self.state
        waiting = [*state.queue, *state.returning, *([state.chunked] if state.chunked else ())]
        return {
            **{index: 0 for _, index, _ in self._coming},
            **{progress.index: progress.generated_tokens for progress in waiting},
            **{p.index: p.age_offset + state.decode.step for p in state.decode},
        }

    def _next_event_s(self) -> float:
        """Return when the next request comes."""
        return self._coming[0][0] if self._coming else math.inf

    def _receive(self) -> None:
        state = self.state
        while self._coming and self._coming[0][0] <= self.now_s:
            _, index, request = heapq.heappop(self._coming)
            job = Job(
                arrival=state.core.num_arrivals,
                input_tokens=request.input_tokens,
                max_new_tokens=request.max_new_tokens,
                distribution=request.distribution or UNKNOWN,
                served_at_arrival_tokens=state.core.served_tokens,
                arrival_s=request.arrival_s,
                hints=request.hints,
                is_pinned=request.is_pinned,
                adapter=request.adapter,
                batch=request.batch,
            )
            if isinstance(self._policy, SrptOracle):
                truth = np.array([request.output_tokens])
                job.distribution = LengthDistribution(truth, np.ones(1), 1.0, "truth")
            state.core.arrived(job)
            if isinstance(self._policy, StockPolicy):
                self._policy.arrived(job)
            hints = request.hints
            deadlines = Deadlines.of(hints) if hints.has_slo else self._options.due
            progress = Progress(request, index, job, deadlines=deadlines)
            if self._refuses(progress):
                self._ended_early(index, job)
                continue
            state.queue.append(progress)

    def _refuses(self, progress: Progress) -> bool:
        state, core, job = self.state, self.state.core, progress.job
        most = state.engine.max_queued_requests
        if most is not None and sum(not each.swapped for each in state.queue) >= most:
            return True
        if core.limits.batches.refuses(job, state.server, self.now_s) is not None:
            return True
        overload = core.limits.overload
        if not overload.config.may_refuse:
            return False
        state.running_jobs()  # brings their ages up to date
        found = state.pool.found_tokens(progress), state.pool.host_tokens(progress)
        job.shared_tokens = state.pool.shared_tokens(progress)
        core.found(job, *found, state.server)
        waiting = [*state.queue, *([state.chunked] if state.chunked else ())]
        if overload.overflows(job, sum(unfilled_tokens(each.job) for each in waiting)):
            return True
        if not overload.config.enabled:
            return False
        newcomer = core.newcomer(job, state.server)
        others_wait = bool(state.queue)
        may_refuse = others_wait or len(state.decode) > 0
        refusal = core.refuses(job, newcomer, may_refuse=may_refuse, others_wait=others_wait)
        return refusal is not None

    def _end_lost(self) -> None:
        """End retracted requests whose answers cannot go on, with an error."""
        while self.state.lost:
            progress = self.state.lost.pop()
            self._ended_early(progress.index, progress.job)

    def _ended_early(self, index: int, job: Job) -> None:
        self.state.core.ended(job)
        self.num_outstanding -= 1
        self.refused.append(index)

    def _host_s(self) -> float:
        """Return the host's seconds for the step of the latest pass."""
        state = self.state
        any_waits = isinstance(self._policy, Policy) and len(state.queue) > 0
        host, num_running = state.engine.host, len(state.decode)
        return host.work_s(num_running, any_waits=any_waits, plans=self._result.plans)

    def _move(self, num_tokens: int, num_requests: int) -> None:
        """Move the KV of requests to host memory and back."""
        engine = self.state.engine
        self.now_s += num_tokens * engine.swap_token_s + num_requests * engine.host.move_s
        if num_requests and engine.host.drains:
            self.now_s += self._host_s()
        self.moved_tokens += num_tokens

    def _prefill(self, parts: Sequence[Part]) -> None:
        """Run the prefill step of a pass."""
        state, engine = self.state, self.state.engine
        num_tokens = sum(part.new_tokens for part in parts)
        pairs = sum(attended_pairs(part.cached_tokens, part.new_tokens) for part in parts)
        # If the prefill leaves no room for their next tokens, running requests skip this step.
        decode = state.decode
        mixes = engine.mixed_chunk and decode.pages_needed(1) <= state.pool.room_pages
        num_decodes, kv_tokens = (len(decode), decode.context_tokens) if mixes else (0, 0)
        step_s = engine.step_time.mixed_s(len(parts), num_tokens, pairs, num_decodes, kv_tokens)
        step_s = max(step_s, self._host_s())
        is_cut = False
        if num_decodes:
            self._leap(1, Pace(step_s))
        elif is_cut := slices.is_cut(state, parts):
            self._in_slices(parts, step_s)
        else:
            self.now_s += step_s
        jobs, numbers = zip(*((part.progress.job, part.new_tokens) for part in parts), strict=True)
        if num_decodes or is_cut:
            state.core.worked(jobs, numbers)
        else:
            state.core.prefilled(jobs, numbers, pairs)
        self.prefill_tokens += num_tokens
        if not len(state.decode):
            state.stale_prefill_tokens = num_tokens
        if state.chunked is not None or not len(state.decode):
            # As in get_next_batch_to_run: the chunked request leaves the batch again, as if it had
            # ended. If nothing ran, the prefill batch becomes the running batch, with a flag of its
            # own.
            state.is_full = False
        for part in parts:
            progress = part.progress
            progress.prefilled_tokens = part.cached_tokens + part.new_tokens
            state.pool.publish(progress, progress.prefilled_tokens)
            if part.completes:
                self._first_token(progress)

    def _in_slices(self, parts: Sequence[Part], step_s: float) -> None:
        """Prefill a batch in slices. After each, more urgent requests may be prefilled
        (slices.passing) and, if one of these decodes, all decoding requests get a token."""
        state, engine = self.state, self.state.engine
        state.parked = [part.progress for part in parts]
        for number in range(engine.slices):
            if number:
                self.now_s += engine.slice_overhead_s
                self._receive()
                state.now_s = self.now_s
                while passing := slices.passing(state):
                    self._prefill(passing)
                if slices.decodes(state):
                    self._leap(1, state.decode.pace(engine.step_time))
            self.now_s += step_s / engine.slices
        state.parked = []

    def _first_token(self, progress: Progress) -> None:
        progress.job.grow(progress.generated_tokens + 1)
        if progress.first_token_s >= 0:
            self._note_gap(progress, self.now_s)
        progress.token_s = self.now_s
        if progress.first_token_s < 0:
            progress.first_token_s = self.now_s
        elif progress.deadlines is not None:  # it was retracted, and goes on
            progress.num_next_on_time += self.now_s <= _due_s(progress, progress.generated_tokens)
        if progress.generated_tokens == progress.request.output_tokens:
            self._finish(progress)
        else:
            self.state.decode.join(progress)

    def _decode(self, until_s: float) -> None:
        """Decode in a leap to the next event."""
        state, decode = self.state, self.state.decode
        fitting = decode.steps_that_fit(state.pool.room_pages)
        retracts = fitting == 0
        if retracts:
            self._retract()
            if not len(decode):
                return
            fitting = decode.steps_that_fit(state.pool.room_pages)
        steps = min(fitting, decode.steps_to_finish())
        if state.chunked or state.returning or (len(state.queue) and not state.is_full):
            steps = 1
        elif len(state.queue) and state.can_swap:
            due = state.core.last_plan.next
            until_s = min(until_s, due.at_s)
            if due.interval_tokens:
                steps = min(steps, decode.steps_to_refresh(due.interval_tokens))
            elif (left_tokens := due.at_tokens - state.core.served_tokens) < math.inf:
                steps = min(steps, 1 + max(0, math.floor(left_tokens)) // len(decode))
        next_s = min(until_s, self._next_event_s())
        pace, host_s = decode.pace(state.engine.step_time), self._host_s()
        if slow_steps := pace.steps_within(host_s):
            # They take the host's time. It plans in the first one only.
            steps, pace = min(steps, 1 if self._result.plans else slow_steps), Pace(host_s)
        steps = min(steps, pace.steps_to_pass(next_s - self.now_s))
        state.ratio.decay(steps - retracts)
        self._leap(steps, pace)

    def _leap(self, steps: int, pace: Pace) -> None:
        """Give each decoding request one token per step."""
        state, decode = self.state, self.state.decode
        seconds, growth_s = pace.seconds(steps), pace.growth_s
        first_s = seconds / steps - growth_s * (steps - 1) / 2
        last_s = first_s + growth_s * (steps - 1)
        for progress in decode:
            if (deadlines := progress.deadlines) is not None:
                due_s = _due_s(progress, progress.age_offset + decode.step + 1) - self.now_s
                progress.num_next_on_time += num_on_time(
                    steps, first_s, growth_s, due_s, deadlines.tpot_s
                )
            self._note_gap(progress, self.now_s + first_s)
            if steps > 1:
                progress.longest_gap_s = max(progress.longest_gap_s, last_s)
            progress.token_s = self.now_s + seconds
        self.gaps[round(seconds / steps * GAPS_PER_S)] += (steps - 1) * len(decode)
        self.now_s += seconds
        state.served(steps)
        state.pool.hold(decode.pages_needed(steps))
        decode.leap(steps)
        for progress in decode.finished():
            self._finish(progress)

    def _note_gap(self, progress: Progress, token_s: float) -> None:
        """Record the gap before a token that comes at this time."""
        gap_s = token_s - progress.token_s
        self.gaps[round(gap_s * GAPS_PER_S)] += 1
        progress.longest_gap_s = max(progress.longest_gap_s, gap_s)
        if gap_s >= PAUSE_S:
            progress.pauses_s.append((progress.token_s, token_s))

    def _finish(self, progress: Progress) -> None:
        state = self.state
        progress.last_token_s = self.now_s
        state.pool.publish(progress, progress.kv_tokens)
        state.pool.leave(progress)
        state.core.ended(progress.job)
        state.is_full = False
        self.num_outstanding -= 1
        self._on_finish(progress)

    def _retract(self) -> None:
        self.state.retract()
        self._end_lost()


def _due_s(progress: Progress, token: int) -> float:
    """Return the deadline of a token after the first, of a request with deadlines."""
    assert progress.deadlines is not None
    return progress.request.arrival_s + progress.deadlines.due_s(token)
