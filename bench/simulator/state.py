"""The state of one simulated engine, all but the clock."""

from __future__ import annotations

from dataclasses import dataclass

from bench.simulator.decode import DecodeBatch
from bench.simulator.pool import KvPool
from bench.simulator.presets import Engine
from bench.simulator.request import Progress
from bench.simulator.stock import StockPolicy
from bench.simulator.waiting import WaitingQueue
from sage_sched.outlook import Outlook
from sage_sched.policy import Policy

# SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR,
# SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS and SGLANG_RETRACT_DECODE_STEPS.
_INIT_RATIO = 0.7
_MIN_RATIO_FACTOR = 0.14
_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """What the real engine has no flag for.

    preempt: whether running requests yield where the policy says so, their KV swapped to host
        memory. max_yields: how often one request does at most.
    prediction_delay_s: how much later a request reaches the scheduler, stock policies excepted.
    check: whether the invariants are checked at every event.
    """

    preempt: bool = False
    max_yields: int = 4
    prediction_delay_s: float = 0.0
    check: bool = False


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
        """After a retraction, from those that are left."""
        generated = sum(p.age_offset + decode.step for p in decode)
        caps = sum(p.request.max_new_tokens for p in decode)
        self.value = min(1.0, (generated + RETRACT_DECODE_STEPS * len(decode)) / (caps + 1))


class EngineState:
    """batch_is_full: SGLang's flag; no admission until a request leaves.
    outlook: of our policies, unless admission is to be SGLang's; see sage_sched.outlook.
    chunked: the one request that is in the middle of its prefill.
    served_tokens: prefilled and decoded. stale_prefill_tokens: see stock.HrrnPolicy.
    """

    def __init__(self, engine: Engine, policy: Policy, options: Options) -> None:
        self.engine = engine
        self.policy = policy
        self.preempts = options.preempt and type(policy).yields is not Policy.yields
        self.max_yields = options.max_yields
        self.pool = KvPool(engine.kv_pool_tokens, engine.page_size)
        self.decode = DecodeBatch(engine.page_size)
        self.queue = WaitingQueue(policy)
        self.ratio = NewTokenRatio(engine.schedule_conservativeness)
        quantile = policy.config.admission_quantile
        foresees = quantile > 0 and not isinstance(policy, StockPolicy)
        self.outlook = Outlook(quantile) if foresees else None
        self.chunked: Progress | None = None
        self.batch_is_full = False
        self.served_tokens = 0
        self.stale_prefill_tokens = 0
        self.num_queued = 0

    def served(self, num_steps: int) -> None:
        """Count the tokens of decode steps."""
        stock_clock = isinstance(self.policy, StockPolicy) and self.policy.counts_stale_prefill
        per_step = self.stale_prefill_tokens if stock_clock else len(self.decode)
        self.served_tokens += num_steps * per_step

    def requeue(self, progress: Progress) -> None:
        """Put a retracted or yielding request, which has left the batch, back into the queue."""
        job = progress.job
        job.generated_tokens = progress.generated_tokens
        if isinstance(self.policy, StockPolicy):
            self.policy.requeued(job, self.num_queued, self.served_tokens)
            self.policy.cached(job, progress.tree_tokens)
            self.num_queued += 1
        self.queue.add(progress, self.served_tokens)

    def hold(self, num_pages: int) -> None:
        """Take pages of the pool."""
        self.evicted(self.pool.hold(num_pages))

    def evicted(self, owners: list[Progress]) -> None:
        """Waiting requests have lost their cached tokens."""
        if owners and isinstance(self.policy, StockPolicy):
            for progress in owners:
                self.policy.cached(progress.job, 0)
            self.queue.keys_changed()
