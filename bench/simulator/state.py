"""The state of one simulated engine, without the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.simulator.decode import DecodeBatch
from bench.simulator.kv import SimKv
from bench.simulator.pool import KvPool
from bench.simulator.presets import Engine
from bench.simulator.request import Progress
from bench.simulator.stock import Reserve, StockPolicy
from sage_sched.app.config import SageConfig
from sage_sched.headroom import Headroom
from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.plan import PreemptionMode
from sage_sched.policy import FcfsFill, NoParameters, Policy
from sage_sched.scheduler import Scheduler
from sage_sched.slo import Deadlines
from sage_sched.view import SchedulerView

# SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR,
# SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS and SGLANG_RETRACT_DECODE_STEPS.
_INIT_RATIO = 0.7
_MIN_RATIO_FACTOR = 0.14
_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """Options for which the real engine has no flag.

    preempt: whether running requests are preempted if the policy wants it, and swapped out to host
        memory if KV memory runs out.
    prediction_delay_s: the delay of a request on its way to the scheduler, except under stock
        policies.
    due: deadlines for requests that have none. They count in the result; policies do not see them.
    watch: called at every event, with the queue before and after the pass, and the number of
        unfinished requests that have come.
    """

    preempt: bool = True
    prediction_delay_s: float = 0.0
    due: Deadlines | None = None
    watch: Callable[[EngineState, list[Progress], list[Progress], int], None] | None = None


class NewTokenRatio:
    """SGLang's NewTokenRatioTracker: the share of its cap that an answer is expected to use."""

    def __init__(self, conservativeness: float) -> None:
        """conservativeness: --schedule-conservativeness."""
        self._first = min(1.0, _INIT_RATIO * conservativeness)
        self._least = self._first * _MIN_RATIO_FACTOR
        self._decay = (self._first - self._least) / _RATIO_DECAY_STEPS
        self.value = self._first

    def decay(self, num_steps: int) -> None:
        self.value = max(self._least, self.value - num_steps * self._decay)

    def reset(self) -> None:
        self.value = self._first

    def estimate(self, decode: DecodeBatch) -> None:
        """Estimate the share from the requests that are left after a retraction."""
        generated = sum(p.age_offset + decode.step for p in decode)
        caps = sum(p.request.max_new_tokens for p in decode)
        self.value = min(1.0, (generated + RETRACT_DECODE_STEPS * len(decode)) / (caps + 1))


class EngineState:
    """The state of one engine.

    is_full: SGLang's batch_is_full: nothing is admitted until a request leaves.
    can_swap: whether requests are swapped out.
    core: decides, unless the policy is SGLang's.
    now_s: when the latest pass began.
    queue: waiting requests, as SGLang's waiting_queue.
    chunked: the request in the middle of its prefill, or None.
    parked: requests of a prefill that is between two slices (slices.py).
    returning: requests that are back on the device, and decode from the next pass on.
    lost: retracted requests whose answers cannot go on (Job.is_pinned).
    stale_prefill_tokens: see stock.HrrnPolicy.
    num_preemptions: how many, by whether memory ran out (else they were for a waiting request), and
        by mode.
    host_tokens, peak_host_tokens: KV of swapped-out requests, now and at most.
    num_passes: passes that have let SGLang admit; see executor.py.
    """

    kv_type = SimKv

    def __init__(
        self, engine: Engine, policy: Policy | StockPolicy, config: SageConfig, options: Options
    ) -> None:
        self.engine = engine
        self.policy = policy
        self._config = config
        self.server = engine.server_facts()
        leaves = options.preempt and isinstance(policy, Policy)
        self.can_swap = leaves
        ours = policy if isinstance(policy, Policy) else FcfsFill(NoParameters(), self.server)
        headroom = Headroom(0, engine.page_size, engine.kv_pool_tokens)
        self.core = Scheduler(ours, Limits(), headroom)
        self.now_s = 0.0
        self.pool = KvPool(engine.kv_pool_tokens, engine.page_size, engine.host_tier)
        self.decode = DecodeBatch(engine.page_size)
        self.queue: list[Progress] = []
        self.ratio = NewTokenRatio(engine.schedule_conservativeness)
        self.chunked: Progress | None = None
        self.parked: list[Progress] = []
        self.returning: list[Progress] = []
        self.lost: list[Progress] = []
        self.is_full = False
        self.stale_prefill_tokens = 0
        self.num_passes = 0
        self.host_tokens = 0
        self.peak_host_tokens = 0
        self.num_preemptions: Counter[tuple[bool, PreemptionMode]] = Counter()
        if isinstance(policy, Policy):
            self.follow(policy)

    def follow(self, policy: Policy) -> None:
        """Switch to a policy, which gets the unfinished requests in order of arrival."""
        self.join_returning()
        limits = self._config.limits(policy)
        limits = replace(limits, bounds=limits.bounds_after(self.core.limits))
        self.policy = policy
        self.pool.tree.rate = None
        if (sessions := limits.sessions) is not None:
            self.pool.tree.rate = lambda session: sessions.rate(session, self.now_s)
        self.is_full = False
        chunked = [] if self.chunked is None else [self.chunked.job]
        jobs = [*self.running_jobs(), *chunked, *(progress.job for progress in self.queue)]
        self.core.switched(policy, limits, sorted(jobs, key=lambda job: job.arrival))

    @property
    def runs_any(self) -> bool:
        """Whether any request decodes, or is about to."""
        return len(self.decode) > 0 or bool(self.returning)

    @property
    def has_work(self) -> bool:
        """Whether any request is here."""
        return self.runs_any or bool(self.queue) or self.is_chunking

    @property
    def is_chunking(self) -> bool:
        return self.chunked is not None

    @property
    def is_short(self) -> bool:
        """Whether memory runs out at the next decode step."""
        return self.step_tokens > self.pool.room_tokens

    @property
    def num_mixed(self) -> int:
        """The tokens that SGLang subtracts from a pass's budgets for requests that decode in the
        same step."""
        return len(self.decode) if self.engine.mixed_chunk else 0

    @property
    def pass_tokens(self) -> int:
        """The most prompt tokens of a pass (see SchedulerView)."""
        engine = self.engine
        return min(engine.max_prefill_tokens, engine.chunked_prefill_size) - self.num_mixed

    @property
    def free_slots(self) -> int:
        """The number of free slots."""
        num_taken = len(self.decode) + len(self.parked) + len(self.returning)
        return self.engine.max_running_requests - num_taken

    @property
    def reserve(self) -> Headroom | Reserve:
        """Return the memory that admission keeps free."""
        if isinstance(self.policy, StockPolicy) or self.engine.reserves:
            clip_tokens = self.engine.clip_max_new_tokens
            return Reserve(self.ratio.value, clip_tokens, self.engine.page_size)
        return self.core.headroom

    @property
    def adapters(self) -> set[str]:
        """The adapters of the requests on the device."""
        chunked = [self.chunked] if self.chunked else ()
        begun = (*self.decode, *self.parked, *self.returning, *chunked)
        return {progress.request.adapter for progress in begun}

    def has_adapter(self, progress: Progress, beside: set[str]) -> bool:
        """Whether a request's adapter fits on the device together with these."""
        return len({progress.request.adapter, *beside}) <= self.engine.max_loras_per_batch

    def running_jobs(self) -> list[Job]:
        """Return the jobs of the batch, at their current age."""
        jobs = []
        for progress in self.decode:
            self.decode.sync(progress)
            progress.job.held_tokens = progress.kv_tokens
            jobs.append(progress.job)
        return jobs

    def view(self) -> SchedulerView:
        """Return a policy's view of a pass."""
        if self.chunked is not None:
            self.chunked.job.prefill(self.chunked.prefilled_tokens)
        waiting = [progress.job for progress in self.queue]
        return SchedulerView(
            now_s=self.now_s,
            served_tokens=self.core.served_tokens,
            num_arrivals=self.core.num_arrivals,
            waiting=waiting,
            swapped=dict.fromkeys(progress.job for progress in self.queue if progress.swapped),
            running=self.running_jobs(),
            chunked=None if self.chunked is None else self.chunked.job,
            batch_is_full=self.is_full,
            free_slots=self.free_slots,
            room_tokens=self.pool.room_tokens,
            locked_tokens=self.pool.held_pages * self.pool.page_size,
            host_free_tokens=self.engine.host_pool_tokens - self.host_tokens,
            page_size=self.pool.page_size,
            step_tokens=self.step_tokens,
            pass_tokens=self.pass_tokens,
            server=self.server,
            can_swap=self.can_swap,
            may_preempt=self.can_swap,
            kv=self.kv_type(
                self.queue,
                waiting,
                self.chunked,
                self.decode,
                self.pool,
                self.engine.max_loras_per_batch,
            ),
        )

    @property
    def step_tokens(self) -> int:
        """KV that the next decode step takes, in whole pages."""
        if not len(self.decode):
            return 0
        return self.decode.pages_needed(1) * self.pool.page_size

    def leave(self, progress: Progress, way: PreemptionMode) -> int:
        """Take a running request off the device, and return how many tokens are copied to host
        memory."""
        self.decode.leave(progress)
        if way is PreemptionMode.RECOMPUTE:
            self.pool.publish(progress, progress.kv_tokens)
        elif progress.node is not None:
            for node in progress.node.path():
                node.session = ""  # it comes back with all of its KV
        self.pool.leave(progress)
        progress.swapped = way is PreemptionMode.SWAP
        progress.job.num_preemptions += 1
        if not progress.swapped:
            return 0
        self.host_tokens += progress.kv_tokens
        self.peak_host_tokens = max(self.peak_host_tokens, self.host_tokens)
        return progress.kv_tokens

    def swap_in(self, progress: Progress) -> bool:
        """Bring a request back. Return False if there is no room for it."""
        if self.free_slots < 1 or not self.has_adapter(progress, self.adapters):
            return False
        if not self.pool.take_back(progress):
            return False
        progress.swapped = False
        self.host_tokens -= progress.kv_tokens
        self.returning.append(progress)
        return True

    def join_returning(self) -> None:
        """Let the requests that are back decode on, a pass later than they came: SGLang's loop does
        not wait for their KV (patches/scheduler/preemption.py)."""
        while self.returning:
            self.decode.join(self.returning.pop(0))

    def retention_order(self) -> list[Progress]:
        """Return the decoding requests, from the first to keep to the first to retract. Under
        SGLang's policies the fewest output tokens are retracted first, then the longest input, then
        the last in the batch."""
        order = sorted(self.decode, key=lambda p: (-p.age_offset, p.request.input_tokens))
        if not isinstance(self.policy, Policy):
            return order
        jobs = [progress.job for progress in order]
        places = self.core.retention_order(jobs, range(len(jobs)), self.view())
        return [order[place] for place in places]

    def retract(self, chunk_tokens: Callable[[], int] = lambda: 0) -> None:
        """Retract requests until the next step and the next chunk fit, as SGLang's retract_decode
        does."""
        order = self.retention_order()
        retracted: list[Progress] = []
        while order and self.step_tokens + chunk_tokens() > self.pool.room_tokens:
            progress = order.pop()
            self.decode.leave(progress)
            self.pool.leave(progress)
            self.pool.free_at_least(len(order) * RETRACT_DECODE_STEPS)
            progress.num_retractions += 1
            retracted.append(progress)
        self.ratio.estimate(self.decode)
        for progress in retracted:
            if progress.job.is_pinned and isinstance(self.policy, Policy):
                self.lost.append(progress)
            else:
                self.requeue(progress)
        self.is_full = False
        self.core.plan_again()

    def served(self, num_steps: int) -> None:
        """Count the tokens of decode steps."""
        stock_clock = isinstance(self.policy, StockPolicy) and self.policy.counts_stale_prefill
        per_step = self.stale_prefill_tokens if stock_clock else len(self.decode)
        self.core.decoded(num_steps * per_step)

    def requeue(self, progress: Progress) -> None:
        """Put a retracted request, which has left the batch, back into the queue."""
        if isinstance(self.policy, StockPolicy):
            self.policy.requeued(progress.job, self.core.num_arrivals, self.core.served_tokens)
            self.core.num_arrivals += 1
        self.queue.append(progress)
