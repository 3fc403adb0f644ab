"""Who may leave the device on this server, and how plans that say so are carried out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.utils.rank_consensus_checker import rank_consensus

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.calibration import Calibration
from patches.scheduler.kv_copy import can_leave_now, counts_tokens, freed_tokens
from patches.scheduler.kv_swap import KvSwap
from patches.scheduler.survival import why_it_stays, why_none_yields
from sage_sched.config import PreemptionConfig
from sage_sched.job import Job
from sage_sched.plan import Plan, Yield
from sage_sched.switch import Settings
from sage_sched.view import Holding

logger = logging.getLogger(__name__)


def preemption_of(
    scheduler: Scheduler, settings: Settings, calibration: Calibration
) -> Preemption | None:
    """None if no request may leave the device, or this server cannot swap."""
    config = settings.config.preemption
    if not config.enabled or settings.is_stock:
        return None
    if reason := why_none_yields(scheduler):
        logger.warning("running requests do not yield on this server: it has %s", reason)
        return None
    return Preemption(scheduler, config, calibration)


class Preemption:
    """Preemption on one scheduler.

    swap: takes requests off the device and back.
    num_arrivals_planned: how many requests had come when the last plan was made; -1 if it could not
        be carried out, so that another is due.
    """

    def __init__(
        self, scheduler: Scheduler, config: PreemptionConfig, calibration: Calibration
    ) -> None:
        self._scheduler = scheduler
        self.config = config
        self.swap = KvSwap(scheduler, config.host_pool_gib, calibration)
        self.num_arrivals_planned = -1
        self._num_staying: Counter[str] = Counter()
        self._num_without_host_room = 0

    def follow(self, settings: Settings) -> None:
        """From now on requests leave by another policy. If none may leave any more, those that have
        left come back."""
        config = settings.config.preemption
        self.config = replace(config, enabled=config.enabled and not settings.is_stock)
        self.swap.resize(config.host_pool_gib)
        self.num_arrivals_planned = -1

    def stats(self) -> dict[str, Any]:
        """Counters for /server_info. num_staying: requests that were chosen to yield but may not,
        by what they use."""
        return {
            **self.swap.stats(),
            "num_without_host_room": self._num_without_host_room,
            "num_staying": dict(self._num_staying),
        }

    def holdings(self, running: Sequence[Req]) -> Callable[[Job], Holding | None]:
        """For a view: what a running request holds; None if it has to stay."""
        requests: dict[Job, Req] = {}

        def holding(job: Job) -> Holding | None:
            if not requests:
                requests.update((req.sage.job, req) for req in running)
            req = requests[job]
            if not can_leave_now(req) or not self._survives(req):
                return None
            return Holding(
                kv_tokens=req.seqlen,
                # It will find again what it found in the radix tree at its start.
                cached_tokens=min(req.cached_tokens, req.seqlen),
                freed_tokens=freed_tokens(self._scheduler, req),
                stays_whole=counts_tokens(req),
            )

        return holding

    def _survives(self, req: Req) -> bool:
        """Whether all that a request uses is known to survive a swap."""
        state = req.sage
        if not state.was_asked_to_yield:
            state.was_asked_to_yield = True
            state.why_it_stays = why_it_stays(req)
            if state.why_it_stays is not None:
                if state.why_it_stays not in self._num_staying:
                    logger.info("requests that use %s do not yield", state.why_it_stays)
                self._num_staying[state.why_it_stays] += 1
        return state.why_it_stays is None

    def take_out(self, running_batch: Batch, action: Yield) -> Req | None:
        """A running request leaves the device; None if it cannot."""
        (req,) = (req for req in running_batch.reqs if req.sage.job is action.job)
        out_of_memory = action.to is None
        gone = self.swap.leave(running_batch, req, action.way, is_out_of_memory=out_of_memory)
        return req if gone else None

    def bring_back(self, running_batch: Batch, requests: Sequence[Req]) -> tuple[Batch, list[Req]]:
        """The running batch with swapped requests in it, and those for which there is no room."""
        running_batch, left = self.swap.resume(running_batch, requests)
        for req in requests:
            if req not in left:
                req.sage.waits.ends()
        return running_batch, left

    def carried_out(
        self,
        plan: Plan,
        queue: Sequence[Req],
        entering: list[Req],
        left: list[Req],
        yielded: list[Req],
    ) -> None:
        """Count and trace what became of a plan's actions. queue: in the plan's order."""
        self._num_without_host_room += plan.num_without_host_room
        if (trace := self._scheduler.sage.trace) is not None:
            known = (*queue[: len(plan.actions)], *yielded)
            trace.carried_out(
                plan.actions[: len(entering) + len(yielded)],
                {req.sage.job: req.rid for req in known},
                [req.rid for req in left],
            )
        self._agree(*([req.rid for req in reqs] for reqs in (entering, left, yielded)))

    @rank_consensus(same_params=True)  # type: ignore[untyped-decorator]
    def _agree(self, entering: list[str], left: list[str], yielded: list[str]) -> None:
        """For SGLang's check that ranks agree (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER): what became
        of a plan, by request id. left: requests that were to enter and found no room."""
