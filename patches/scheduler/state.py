"""Defines our state of one scheduler: its policy, its settings and its listeners."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

from patches.engine_types import Batch, Req, Scheduler
from patches.failures import Failures
from patches.listener import Listener, Listeners
from patches.messages import StepTimes
from patches.probe.setup import probing_of
from patches.scheduler import view
from patches.scheduler.batches import BatchGate
from patches.scheduler.calibration import Calibration
from patches.scheduler.early_aborts import EarlyAborts
from patches.scheduler.gap_meter import GapMeter
from patches.scheduler.hidden import Room
from patches.scheduler.jobs import Jobs
from patches.scheduler.metrics import SchedulerMetrics
from patches.scheduler.overload import OverloadGate
from patches.scheduler.preemption import preemption_of
from patches.scheduler.priorities import follow_settings, level_gap
from patches.scheduler.request import WaitListener
from patches.scheduler.retraction import end_lost, ends_in_pause
from patches.scheduler.session_kv import SessionKv
from patches.scheduler.slo_meter import SloMeter
from patches.scheduler.survival import why_not_retractable
from patches.scheduler.trace import trace_of
from patches.scheduler.wait_budgets import WaitBudgets
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_named
from sage_sched.app.switch import Settings
from sage_sched.headroom import Headroom
from sage_sched.plan import Plan
from sage_sched.policy import FcfsFill, NoParameters, Policy
from sage_sched.scheduler import Scheduler as Core
from sage_sched.steps import FEW_CUTS, ServerFacts
from sage_sched.view import SchedulerView

logger = logging.getLogger(__name__)


class SchedulerState:
    """Our state of one scheduler, kept as `Scheduler.sage`. All ranks make the same plans; their
    clocks are read for counters only.

    listeners: receive all events of this scheduler.
    preemption: None while no request may be preempted.
    last_preemption: the latest preemption, kept even while none is allowed, because it may still
        hold copies.
    is_stock: whether SGLang orders and admits by itself.
    core: decides.
    any_has_ended: whether a request has ended since the last pass.
    reserve_tokens: see sage_sched.steps.ServerFacts.
    only_decodes: whether the KV of prompts comes from a prefill server.
    room: on a decode server, which requests may enter the KV pool.
    """

    def __init__(self, scheduler: Scheduler, config: SageConfig) -> None:
        scheduler.sage = self
        self.only_decodes = view.only_decodes(scheduler)
        self._scheduler = scheduler
        self.calibration = Calibration.of(scheduler, config)
        self.session_kv = SessionKv(scheduler)
        self.reserve_tokens = _reserve_tokens(scheduler)
        self._server = ServerFacts(
            scheduler.max_total_num_tokens,
            scheduler.max_running_requests,
            self.calibration.step_time,
            swap_token_s=0.0,  # until a request is swapped out
            mixes_steps=scheduler.is_mixed_chunk,
            reserve_tokens=self.reserve_tokens,
            level_gap=level_gap(scheduler),
            forgets=self.session_kv.forgets,
        )
        self.settings = Settings(scheduler.schedule_policy, config)
        self.is_stock = self.settings.is_stock
        _warn_of_tpot(scheduler, config)
        self.failures = Failures()
        policy = self.policy_of(self.settings)
        headroom = Headroom(
            0, scheduler.page_size, scheduler.max_total_num_tokens, self.reserve_tokens
        )
        self.core = Core(policy, self.settings.limits(policy), headroom, self.failures.count)
        self.jobs = Jobs(scheduler, self.core)
        # The pass that is being made (patches.scheduler.executor).
        self.this_pass: Any = None
        self._num_passes = self._num_too_long = 0
        self._passes_s = self._longest_pass_s = 0.0
        self.probing = probing_of(scheduler, self.core, config.probe, self.failures)
        self.room = Room()
        self.early_aborts = EarlyAborts()
        self.preemption = self.last_preemption = preemption_of(scheduler, self.settings, None)
        self.any_has_ended = False
        self._num_switches = 0
        self.overload = OverloadGate(scheduler)
        self.batches = BatchGate(scheduler)
        metrics, self.trace = SchedulerMetrics(scheduler), trace_of(scheduler)
        found: list[Listener | None] = [
            # First, before other listeners take time after a step.
            self.calibration,
            # Before the listeners that need a new request's Job.
            self.jobs,
            # Before WaitListener, because it reports the waits that WaitListener ends.
            self.trace,
            WaitListener(),
            WaitBudgets(scheduler),
            GapMeter(),
            SloMeter(metrics),
            self.overload,
            self.batches,
            # After Jobs, because it takes the jobs that the policy could rank.
            self.probing,
            metrics,
        ]
        self.listeners = Listeners(filter(None, found))
        follow_settings(scheduler)

    @property
    def server(self) -> ServerFacts:
        """The facts of this server that are known now."""
        if self.preemption is None:
            return self._server
        return replace(self._server, swap_token_s=self.preemption.meter.token_s)

    def policy_of(self, settings: Settings) -> Policy:
        """Return the policy of these settings, the present one if they hardly differ; first come,
        first served for one of SGLang's own. Raises the policy's errors if it cannot be set up."""
        if settings is not self.settings and settings.keeps_policy_of(self.settings):
            return self.core.policy
        if settings.is_stock:
            return FcfsFill(NoParameters(), self._server)
        return policy_named(settings.schedule_policy, settings.config.policy, self._server)

    def switch(self, settings: Settings, policy: Policy, unfinished: Sequence[Req]) -> None:
        """Use these settings and their policy from now on. All ranks call this between the same two
        passes.

        unfinished: all unfinished requests, by arrival.
        """
        is_new, present = policy is not self.core.policy, self.core.limits
        limits = settings.limits_after(self.settings, present, policy, is_new_policy=is_new)
        self.settings, self.is_stock = settings, settings.is_stock
        follow_settings(self._scheduler)
        self._num_switches += 1
        self.last_preemption = preemption_of(self._scheduler, settings, self.last_preemption)
        self.preemption = self.last_preemption
        self.jobs.switch(policy, limits, unfinished)
        self.listeners.switched(settings.schedule_policy, unfinished)

    def plans(self) -> bool:
        """Whether the coming pass follows a plan of ours. Under SGLang's own policy it does so only
        while the KV of some request is in host memory."""
        is_off = self.preemption is not None and not self.preemption.config.enabled
        if is_off and not view.in_host_memory(self._scheduler):
            self.preemption = None
        return not self.is_stock or self.preemption is not None

    def updated(self, update: StepTimes) -> None:
        """Use the step times that rank 0 has learned. All ranks call this."""
        self.calibration.updated(update)
        self._server = replace(self._server, step_time=self.calibration.step_time)
        self.core.updated(self._server)

    def ticked(self, now_s: float, clock: str) -> None:
        """Take in rank 0's clock. All ranks call this."""
        self.jobs.ticked(now_s, clock)

    def stepped(self, batch: Batch, result: Any) -> None:
        """Take in a batch's results. All ranks get the same ones between the same two passes."""
        self.listeners.stepped(batch, result)
        self.end_finished(batch.reqs)

    def end_finished(self, reqs: Iterable[Req]) -> None:
        """End the requests that have finished. Under overlap these are in one more batch, but end
        once."""
        for req in reqs:
            if req.finished_reason is not None:
                self.end(req, isinstance(req.finished_reason, FINISH_ABORT))

    def end(self, req: Req, was_aborted: bool) -> None:
        """End a request that has finished, or was aborted in the queue."""
        if not req.sage.has_ended:
            req.sage.has_ended = self.any_has_ended = True
            self.listeners.ended(req, was_aborted)

    def plan(self, running_batch: Batch) -> Plan:
        """Return the plan of the coming pass."""
        started_s = time.perf_counter()
        served_tokens = self.core.served_tokens
        if self.preemption is not None and served_tokens > self.preemption.meter.rests_at_tokens:
            self.preemption.meter.rest(served_tokens, self._server.kv_pool_tokens)
        plan = self.core.plan(self.view(running_batch))
        pass_s = time.perf_counter() - started_s
        self._num_passes += 1
        self._passes_s += pass_s
        self._longest_pass_s = max(self._longest_pass_s, pass_s)
        self._num_too_long += plan.num_too_long
        self.jobs.planned(plan)
        return plan

    def view(self, running_batch: Batch) -> SchedulerView:
        """Return the facts of a pass."""
        return view.view_of(self._scheduler, running_batch, self.server)

    def retention_order(self, reqs: Sequence[Req], default: Sequence[int]) -> list[int]:
        """Return the positions of running requests, from the first to keep to the first to retract.
        It is SGLang's own order if the policy fails or is SGLang's."""
        if self.is_stock:
            return list(default)
        jobs = self.jobs.running(reqs)
        view = replace(self.view(self._scheduler.running_batch), running=jobs)
        order = self.core.retention_order(jobs, default, view)
        # Jobs that can be swapped but not retracted are not pinned.
        return sorted(order, key=lambda position: why_not_retractable(reqs[position]) is None)

    def retracted(
        self, retracted: Sequence[Req], aborted: Iterable[Req] = ()
    ) -> tuple[list[Req], list[Req]]:
        """Take in the requests that SGLang has retracted or aborted because memory ran out. Return
        the requests that wait again, and the requests that end too
        (patches.scheduler.retraction)."""
        kept, lost = ([*retracted], []) if self.is_stock else end_lost(retracted)
        for req in (*aborted, *lost):
            self.end(req, was_aborted=True)
        return kept, lost

    def ends_in_pause(self, req: Req) -> bool:
        """See patches.scheduler.retraction."""
        return not self.is_stock and ends_in_pause(self._scheduler, req)

    def stats(self) -> dict[str, Any]:
        """Return counters for /server_info.

        num_too_long: summed over all passes, the prompts that are ahead of the chunked one and too
            long to be prefilled with its chunk.
        """
        return {
            "schedule_policy": self.settings.schedule_policy,
            "num_switches": self._num_switches,
            "num_passes": self._num_passes,
            "num_too_long": self._num_too_long,
            "mean_pass_ms": 1e3 * self._passes_s / max(1, self._num_passes),
            "longest_pass_ms": 1e3 * self._longest_pass_s,
            "num_policy_errors": self.failures.num_failures,
            "headroom_steps": self.core.headroom.num_steps,
            "preemption": None if self.last_preemption is None else self.last_preemption.stats(),
            # Defaults for listeners that are absent.
            "trace": None,
            "probe": None,
            **self.listeners.stats(),
        }


def _warn_of_tpot(scheduler: Scheduler, config: SageConfig) -> None:
    """Warn of a TPOT SLO if decodes wait for prefills."""
    does_both = not (view.only_prefills(scheduler) or view.only_decodes(scheduler))
    if config.slo.has_tpot_slo and does_both and not scheduler.is_mixed_chunk:
        logger.warning(
            "some classes have a TPOT SLO, and without --enable-mixed-chunk running requests "
            "wait while others are prefilled. Then a TPOT below %d times the duration of a decode "
            "step plus the fixed time of a prefill cannot be kept",
            FEW_CUTS,
        )


def _reserve_tokens(scheduler: Scheduler) -> int:
    return 1 if scheduler.spec_algorithm.is_none() else int(get_alloc_reserve_per_decode())
