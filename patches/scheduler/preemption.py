"""Running requests yield, and swapped ones come back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang.srt.utils.rank_consensus_checker import rank_consensus

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.calibration import Calibration
from patches.scheduler.kv_copy import (
    can_leave_now,
    counts_tokens,
    freed_tokens,
    is_swapped,
    swapped,
)
from patches.scheduler.kv_swap import KvSwap
from patches.scheduler.survival import why_it_stays, why_none_yields
from sage_sched.config import PreemptionConfig
from sage_sched.job import Job
from sage_sched.plan import Action, Plan, Yield
from sage_sched.switch import Settings
from sage_sched.view import Holding

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan's actions.

    running_batch: with those in it that came back. num_entering: how many the actions let in.
    num_left_out: how many they were to let in and did not, as an action failed.
    fresh: of those let in, those that are to be prefilled. rest: the others that wait, in order,
    first those left out. yielded: off the device now.
    """

    running_batch: Batch
    num_entering: int = 0
    num_left_out: int = 0
    fresh: list[Req] = field(default_factory=list)
    rest: list[Req] = field(default_factory=list)
    yielded: list[Req] = field(default_factory=list)


def preemption_of(
    scheduler: Scheduler, settings: Settings, calibration: Calibration
) -> Preemption | None:
    """None if nobody is to leave the device, or this server cannot swap."""
    config = settings.config.preemption
    if not config.enabled or settings.is_stock:
        return None
    if reason := why_none_yields(scheduler):
        logger.warning("running requests do not yield on this server: it has %s", reason)
        return None
    return Preemption(scheduler, config, calibration)


class Preemption:
    """One scheduler's.

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
        """From now on requests leave by another policy, or none does any more: then those that have
        left come back."""
        config = settings.config.preemption
        self.config = replace(config, enabled=config.enabled and not settings.is_stock)
        self.swap.resize(config.host_pool_gib)
        self.num_arrivals_planned = -1

    def stats(self) -> dict[str, Any]:
        """Counters for /server_info. num_staying: requests that were asked to yield and may not, by
        what they use."""
        return {
            **self.swap.stats(),
            "num_without_host_room": self._num_without_host_room,
            "num_staying": dict(self._num_staying),
        }

    def holdings(self, running: Sequence[Req]) -> Callable[[Job], Holding | None]:
        """For a view: what the running requests hold; None for one that has to stay."""
        requests: dict[Job, Req] = {}

        def holding(job: Job) -> Holding | None:
            if not requests:
                requests.update((req.sage.job, req) for req in running)
            req = requests[job]
            if not can_leave_now(req) or not self._survives(req):
                return None
            return Holding(
                kv_tokens=req.seqlen,
                # What it found in the radix tree at its start, it will find again.
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

    def carry_out(
        self, plan: Plan, num_arrivals: int, queue: Sequence[Req], running_batch: Batch
    ) -> Outcome:
        """The plan's actions, up to one that fails. queue: the waiting, in the plan's order."""
        if plan.is_new:
            self.num_arrivals_planned = num_arrivals
        self._num_without_host_room += plan.num_without_host_room
        entering, yielded = self._make_room(plan.actions, queue, running_batch)
        rest = list(queue[len(entering) :])
        back, left = swapped(entering), list[Req]()
        fresh = [req for req in entering if not is_swapped(req)]
        if back:
            running_batch, left = self.swap.resume(running_batch, back)
            if left:
                self._plan_again(running_batch)
        if (trace := self._scheduler.sage.trace) is not None:
            known = (*queue[: len(plan.actions)], *yielded)
            trace.carried_out(
                plan.actions[: len(entering) + len(yielded)],
                {req.sage.job: req.rid for req in known},
                [req.rid for req in left],
            )
        for req in back:
            if req not in left:
                req.sage.waits.ends()
        self._carried_out(*([req.rid for req in reqs] for reqs in (entering, left, yielded)))
        num_planned = sum(not isinstance(action, Yield) for action in plan.actions)
        num_left_out = num_planned - len(entering) + len(left)
        return Outcome(running_batch, len(entering), num_left_out, fresh, [*left, *rest], yielded)

    def _make_room(
        self, actions: Sequence[Action], queue: Sequence[Req], running_batch: Batch
    ) -> tuple[list[Req], list[Req]]:
        """Those that may enter or come back, and those that yielded to them, or as memory ran
        out: then who may use it is for the next plan, which knows that they wait."""
        entering: list[Req] = []
        yielded: list[Req] = []
        running = {req.sage.job: req for req in running_batch.reqs} if actions else {}
        for action in actions:
            if not isinstance(action, Yield):
                entering.append(queue[len(entering)])
                continue
            req, is_out_of_memory = running[action.job], action.to is None
            gone = self.swap.leave(
                running_batch, req, action.way, is_out_of_memory=is_out_of_memory
            )
            if gone:
                yielded.append(req)
            if is_out_of_memory or not gone:
                self._plan_again(running_batch)
            if not gone:
                break
        return entering, yielded

    def _plan_again(self, running_batch: Batch) -> None:
        """Before the next step, as the present plan could not be carried out: those that have
        left made room that is to be given away."""
        running_batch.batch_is_full = False
        self.num_arrivals_planned = -1

    @rank_consensus(same_params=True)  # type: ignore[untyped-decorator]
    def _carried_out(self, entering: list[str], left: list[str], yielded: list[str]) -> None:
        """What became of a plan, by request id, for SGLang's own check that ranks go on alike
        (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER). left: entered by the plan, and found no room."""
