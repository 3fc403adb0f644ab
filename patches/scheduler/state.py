"""What we keep for one scheduler: its policy and settings, and who carries its plans out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

from patches.engine_types import Batch, Req, Scheduler
from patches.messages import Scores, StepTimes
from patches.probe.setup import probing_of
from patches.scheduler import queues
from patches.scheduler.calibration import Calibration
from patches.scheduler.early_aborts import EarlyAborts
from patches.scheduler.gap_meter import GapMeter
from patches.scheduler.jobs import Failures, Jobs
from patches.scheduler.metrics import SchedulerMetrics, SloMeter
from patches.scheduler.preemption import preemption_of
from patches.scheduler.priorities import level_gap, level_of
from patches.scheduler.session_kv import SessionKv
from patches.scheduler.trace import trace_of
from patches.scheduler.view import Seen, view_of
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_named
from sage_sched.app.switch import Settings
from sage_sched.decide import decide
from sage_sched.gap import FEW_CUTS
from sage_sched.headroom import Headroom
from sage_sched.limits import Limits
from sage_sched.order import retention_order
from sage_sched.plan import Plan
from sage_sched.policy import FcfsFill, NoParameters, Policy
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView

logger = logging.getLogger(__name__)


class SchedulerState:
    """`Scheduler.sage`. All ranks plan alike; their clocks are read for counters only.

    preemption: None while no request may leave. last_preemption: may still hold copies then.
    num_arrivals_planned: how many had come when the last plan was made; -1 if another is due.
    """

    def __init__(self, scheduler: Scheduler, config: SageConfig) -> None:
        scheduler.sage = self
        self.calibration = Calibration.of(scheduler, config)
        self.session_kv = SessionKv(scheduler)
        self._server = ServerFacts(
            scheduler.max_total_num_tokens,
            scheduler.max_running_requests,
            self.calibration.step_time,
            swap_token_s=0.0,  # until something is swapped
            mixes_steps=scheduler.is_mixed_chunk,
            reserve_tokens=_reserve_tokens(scheduler),
            level_gap=level_gap(scheduler),
            forgets=self.session_kv.forgets,
        )
        self._scheduler = scheduler
        self.settings = Settings(scheduler.schedule_policy, config)
        self.policy = self.policy_of(self.settings)
        self.limits = self.limits_of(self.settings, self.policy)
        if config.slo.has_tpot_slo and _decodes_after_prefills(scheduler):
            logger.warning(
                "classes are promised a TPOT, and without --enable-mixed-chunk running requests "
                "wait while others are prefilled: a TPOT of less than %d times what a decode step "
                "and a prefill's fixed time take is not kept then",
                FEW_CUTS,
            )
        self.headroom = Headroom(0, scheduler.page_size)  # of the last plan
        self.failures = Failures()
        mode = scheduler.server_args.disaggregation_mode
        self.jobs = Jobs(self.policy, self.limits, self.failures, mode)
        self.room = queues.Room()  # on a decode server
        self.early_aborts = EarlyAborts()
        self.metrics = SchedulerMetrics(scheduler)
        self.slo = SloMeter(self.metrics)
        self.gaps = GapMeter()
        self.probing = probing_of(scheduler, self.policy, config.probe)
        self.preemption = self.last_preemption = preemption_of(scheduler, self.settings, None)
        self.num_arrivals_planned = -1
        self.seen = Seen()
        # During a pass.
        self.chunk_limit_tokens: int | None = None
        self.num_visible: int | None = None
        self.unplanned: list[Req] = []
        self.trace = trace_of(scheduler)
        if self.trace is not None:
            self.trace.policy(self.settings.schedule_policy)
        self._num_passes = 0
        self._num_switches = 0
        self._num_too_long = 0
        self._pass_s = 0.0
        self._longest_pass_s = 0.0

    def news(self) -> list[StepTimes | Scores]:
        """On rank 0: what to tell to all ranks."""
        scores = None if self.probing is None else self.probing.news()
        found = (self.calibration.news(self._server), scores)
        return [news for news in found if news is not None]

    def told(self, news: StepTimes) -> None:
        """On all ranks: go by the step times that rank 0 has learned."""
        self.calibration.told(news)
        self._server = replace(self._server, step_time=self.calibration.step_time)
        try:
            self.policy.on_server(self._server)
        except Exception:
            self.failures.count("take in step times")

    @property
    def server(self) -> ServerFacts:
        """What is known of it by now."""
        preemption = self.preemption
        return self._server if preemption is None else preemption.priced(self._server)

    def policy_of(self, settings: Settings) -> Policy:
        """The policy of these settings; first come, first served if they name one of SGLang's own.
        Raises what the policy raises if it cannot be set up."""
        if settings.is_stock:
            return FcfsFill(NoParameters(), self._server)
        return policy_named(settings.schedule_policy, settings.config.policy, self._server)

    def limits_of(self, settings: Settings, policy: Policy) -> Limits:
        """The limits of these settings; none if SGLang orders and admits by itself."""
        return Limits() if settings.is_stock else settings.config.decode.limits(policy)

    def go_by(
        self,
        settings: Settings,
        policy: Policy,
        unfinished: Sequence[Req],
        now_s: float,
        clock: str,
    ) -> None:
        """On all ranks, between the same two passes: from now on go by these settings and their
        policy. now_s: on the clock of the ticks. clock: its name."""
        self.settings, self.policy = settings, policy
        self.limits = self.limits_of(settings, policy)
        self.num_arrivals_planned = -1
        self._num_switches += 1
        if self.trace is not None:
            self.trace.policy(settings.schedule_policy)
        self.jobs.follow(policy, self.limits, unfinished, now_s, clock)
        if self.probing is not None:
            self.probing.follow(policy, [req.sage.job for req in unfinished])
        self.last_preemption = preemption_of(self._scheduler, settings, self.last_preemption)
        self.preemption = self.last_preemption

    def plans(self) -> bool:
        """Whether the coming pass goes by a plan of ours. Under SGLang's own order it does so only
        while some request's KV is in host memory."""
        is_off = self.preemption is not None and not self.preemption.config.enabled
        if is_off and not queues.in_host_memory(self._scheduler):
            self.preemption = None
        return not self.settings.is_stock or self.preemption is not None

    def arrived(self, req: Req) -> None:
        """Put a Job on a new request."""
        self.jobs.arrived(req, level_of(req, self._scheduler))
        if self.trace is not None:
            num_waiting = len(queues.waiting(self._scheduler))
            self.trace.came(req, num_waiting, len(self._scheduler.running_batch.reqs))
        req.sage.seen = self.slo.arrived(req, req.sage.job)
        if self.probing is not None:
            self.probing.arrived(req.sage.job)

    def scored(self, scores: Scores) -> None:
        """On all ranks: the scores that rank 0 has read off hidden states."""
        assert self.probing is not None
        try:
            self.probing.told(scores)
        except Exception:
            self.failures.count("take in scores")

    def plan(self, running_batch: Batch) -> Plan:
        """The plan of the coming pass; first come, first served if the policy fails."""
        started_s = time.perf_counter()
        if self.preemption is not None:
            self.preemption.about_to_plan(self.jobs.served_tokens, self._server)
        view = self.view(running_batch)
        try:
            plan = decide(view, self.policy, self.limits)
        except Exception:
            self.failures.count("plan a pass")
            # A new one, as it would keep the jobs of this pass alive.
            plan = decide(view, FcfsFill(NoParameters(), self._server), Limits())
        if plan.order is not None:
            reserve_tokens = self._server.reserve_tokens
            self.headroom = Headroom(
                plan.headroom_steps, view.page_size, reserve_tokens, plan.kept_tokens
            )
        self._num_too_long += plan.num_too_long
        if plan.order is not None:
            waiting = queues.waiting(self._scheduler)
            for position, num_before in plan.places.items():
                waits = waiting[position].sage.waits
                if waits.num_before is None:
                    waits.num_before = num_before
            self.seen.ordered(plan.order)
        spent_s = time.perf_counter() - started_s
        self._num_passes += 1
        self._pass_s += spent_s
        self._longest_pass_s = max(self._longest_pass_s, spent_s)
        return plan

    def about_to_run(self, batch: Batch) -> None:
        """A batch is about to run."""
        if self.trace is not None:
            self.trace.runs(batch)
        self.jobs.about_to_run(batch)

    def joined(self, batch: Batch) -> None:
        """On a decode server: these run from now on, with a first token from elsewhere."""
        for req in batch.reqs:
            req.sage.waits.ends()
        self.have_more(batch.reqs)

    def ended(self, batch: Batch, result: Any) -> None:
        """A batch's results are in. All ranks get the same ones between the same two passes."""
        self.gaps.stepped(batch)
        self.jobs.accepted(batch, getattr(result, "accept_lens", None))
        self.have_more(batch.reqs)

    def have_more(self, reqs: Sequence[Req]) -> None:
        """These may have further tokens, and some of them may have ended."""
        self.slo.stepped(reqs)
        for req in self.jobs.ended(reqs):
            was_aborted = isinstance(req.finished_reason, FINISH_ABORT)
            if self.trace is not None:
                self.trace.ended(req, was_aborted)
            if self.probing is not None and not was_aborted:  # else its length tells nothing
                self.probing.ended(req)

    def view(self, running_batch: Batch) -> SchedulerView:
        """The facts of a pass."""
        return view_of(self._scheduler, running_batch)

    def hide_unplanned(self, visible: list[Req]) -> None:
        """Before SGLang goes through its queue: take out what joined it after the plan."""
        if self.num_visible is not None:
            self.unplanned += visible[self.num_visible :]
            del visible[self.num_visible :]

    def retention_order(self, reqs: Sequence[Req], default: Sequence[int]) -> list[int]:
        """The positions of running requests, from the first to keep to the first to retract. It is
        SGLang's own order if the policy fails or is SGLang's."""
        if self.settings.is_stock:
            return list(default)
        jobs = self.jobs.running(reqs)
        view = replace(self.view(self._scheduler.running_batch), running=jobs)
        try:
            order = retention_order(jobs, default, self.policy, view)
        except Exception:
            self.failures.count("choose whom to retract")
            order = list(default)
        # SGLang begins the answer to a prompt of embeddings anew, though its client has seen some.
        return sorted(order, key=lambda position: reqs[position].input_embeds is None)

    def stats(self) -> dict[str, Any]:
        """Counters for /server_info. num_too_long: summed over all passes, the prompts that are
        ahead of the one being chunked and too long to be prefilled beside its chunk."""
        return {
            "schedule_policy": self.settings.schedule_policy,
            "num_switches": self._num_switches,
            **self.jobs.stats(),
            "num_policy_errors": self.failures.num_failures,
            "num_passes": self._num_passes,
            "num_too_long": self._num_too_long,
            "mean_pass_ms": 1e3 * self._pass_s / max(1, self._num_passes),
            "longest_pass_ms": 1e3 * self._longest_pass_s,
            "headroom_steps": self.headroom.num_steps,
            "preemption": None if self.last_preemption is None else self.last_preemption.stats(),
            "step_time": self.calibration.stats(),
            "gaps": self.gaps.stats(),
            "slo": self.slo.stats(),
            "trace": self.trace.file.stats() if self.trace and self.trace.file else None,
            "probe": None if self.probing is None else self.probing.stats(),
        }


def _decodes_after_prefills(scheduler: Scheduler) -> bool:
    """Whether it does both, and one at a time."""
    does_both = not (queues.only_prefills(scheduler) or queues.only_decodes(scheduler))
    return does_both and not scheduler.is_mixed_chunk


def _reserve_tokens(scheduler: Scheduler) -> int:
    return 1 if scheduler.spec_algorithm.is_none() else int(get_alloc_reserve_per_decode())
