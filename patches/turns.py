"""Before each admission pass of a scheduler: running requests yield, swapped ones come back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice, takewhile
from typing import Any

from sglang.srt.utils.rank_consensus_checker import rank_consensus

from patches.admission import Admission
from patches.mover import Mover
from patches.ranker import Ranker
from patches.survival import why_it_stays, why_none_yields
from patches.swap import can_leave_now, freed_tokens, is_swapped, swapped
from sage_sched.config import PreemptionConfig
from sage_sched.job import Job
from sage_sched.plan import PLAN_WINDOW, Claimant, Departure, Turn, plan_turns
from sage_sched.policy import Policy

logger = logging.getLogger(__name__)


def turn_taker(
    scheduler: Any, ranker: Ranker, admission: Admission, config: PreemptionConfig
) -> TurnTaker | None:
    """None where the policy never preempts, or is not to, or this server cannot swap."""
    if not config.enabled or type(ranker.policy).yields is Policy.yields:
        return None
    if reason := why_none_yields(scheduler):
        logger.warning("running requests do not yield on this server: it has %s", reason)
        return None
    return TurnTaker(scheduler, ranker, admission, config)


class TurnTaker:
    """One scheduler's preemption.

    Decides by what all tensor-parallel ranks have in common: jobs, tokens, pool, slots.
    mover: takes requests off the device and back.
    num_staying: requests that were asked to yield and may not, by what they use.
    """

    def __init__(
        self, scheduler: Any, ranker: Ranker, admission: Admission, config: PreemptionConfig
    ) -> None:
        self._scheduler = scheduler
        self._ranker = ranker
        self._admission = admission
        self._max_yields = config.max_yields
        self._num_arrivals_planned = -1
        self.num_staying: Counter[str] = Counter()
        self.mover = Mover(scheduler, ranker, config)

    def stats(self) -> dict[str, Any]:
        """Counters for /server_info."""
        return {**self.mover.stats(), "num_staying": dict(self.num_staying)}

    def take_turns(self, original: Callable[[Any], Any], running_batch: Any) -> Any:
        """Scheduler.get_new_batch_prefill, with turns taken first.

        SGLang's pass sees the requests that may enter now: never a swapped one, as it would
        prefill it, nor what is behind a swapped one that does not fit yet. A full batch takes in
        those alone to whom others yield, as the simulator does (bench/simulator/admission.py).
        """
        waiting: list[Any] = self._scheduler.waiting_queue
        full = running_batch.batch_is_full and not running_batch.is_empty()
        if (
            not waiting
            or self._scheduler.chunked_req is not None
            or (full and not self._due(running_batch))
        ):
            return self._pass(original, running_batch, [r for r in waiting if not is_swapped(r)])
        self._ranker.sort(waiting)
        entering, yielded = self._settle(running_batch, waiting, full)
        fresh = [req for req in entering if not is_swapped(req)]
        back = swapped(entering)
        rest = waiting[len(entering) :]
        left: list[Any] = []
        if back:
            running_batch, left = self.mover.resume(running_batch, back)
            rest = [*left, *rest]
            if left:
                self._plan_again(running_batch)
        self._carried_out(*([req.rid for req in reqs] for reqs in (entering, left, yielded)))
        self._scheduler.waiting_queue = fresh + rest + yielded
        if full and not entering:
            return self._pass(original, running_batch, [])
        if full:
            running_batch.batch_is_full = False
            plan = self._pass(original, running_batch, fresh)
            left_out = any(req in self._scheduler.waiting_queue for req in fresh)
            plan.running_batch.batch_is_full |= not left_out and self._num_arrivals_planned >= 0
            return plan
        behind = self._behind(running_batch, fresh, rest)
        plan = self._pass(original, running_batch, [*fresh, *behind])
        if rest and is_swapped(rest[0]) and self._num_arrivals_planned >= 0:
            # It found no room. SGLang would have marked the batch so for a request that it sees;
            # without the mark a plan would be made before every step.
            plan.running_batch.batch_is_full |= not plan.running_batch.is_empty()
        return plan

    @rank_consensus(same_params=True)  # type: ignore[untyped-decorator]
    def _carried_out(self, entering: list[str], left: list[str], yielded: list[str]) -> None:
        """What became of a plan, by request id, for SGLang's own check that ranks go on alike
        (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER). left: entered by the plan, and found no room."""

    def _behind(
        self, running_batch: Any, fresh: Sequence[Any], rest: Sequence[Any]
    ) -> Iterable[Any]:
        """Who may enter after those of the plan: up to the first swapped request, whose turn it is
        before theirs. If nobody runs, all may. The swapped one has just found no room then, and
        nobody is about to give any back: others hold it, streaming sessions between turns say."""
        if not fresh and running_batch.is_empty():
            return (req for req in rest if not is_swapped(req))
        return takewhile(lambda req: not is_swapped(req), rest)

    def without_swapped(self, original: Callable[[], Any]) -> Any:
        """Call something that looks at the queue and must not see swapped requests, as they are
        not waiting for a start. The queue stays as it is: a function that only one rank calls must
        not change it."""
        scheduler = self._scheduler
        queue = scheduler.waiting_queue
        scheduler.waiting_queue = [req for req in queue if not is_swapped(req)]
        try:
            return original()
        finally:
            scheduler.waiting_queue = queue

    def _pass(self, original: Callable[[Any], Any], running_batch: Any, visible: list[Any]) -> Any:
        return self._hiding(lambda: original(running_batch), visible)

    def _hiding(self, original: Callable[[], Any], visible: list[Any]) -> Any:
        scheduler = self._scheduler
        hidden = scheduler.waiting_queue
        if visible:
            shown = {id(req) for req in visible}
            hidden = [req for req in hidden if id(req) not in shown]
        scheduler.waiting_queue = visible
        try:
            return original()
        finally:
            scheduler.waiting_queue = scheduler.waiting_queue + hidden

    def _plan_again(self, running_batch: Any) -> None:
        """Before the next step, as the present plan could not be carried out: those that have
        left made room that is to be given away."""
        running_batch.batch_is_full = False
        self._num_arrivals_planned = -1

    def _due(self, running_batch: Any) -> bool:
        """While the batch is full, a plan can only change with a new request or a new index."""
        arrived = self._num_arrivals_planned != self._ranker.num_arrivals
        bucket = self._ranker.bucket_tokens
        return arrived or any(len(req.output_ids) % bucket == 0 for req in running_batch.reqs)

    def _settle(
        self, running_batch: Any, waiting: Sequence[Any], full: bool
    ) -> tuple[list[Any], list[Any]]:
        """Carry a plan out: the first of the waiting, that enter, and who yielded to them."""
        self._num_arrivals_planned = self._ranker.num_arrivals
        requests: dict[Job, Any] = {}
        for req in running_batch.reqs:
            if (job := req.sage_job) is not None:
                job.generated_tokens = len(req.output_ids)
                requests[job] = req
        entering: list[Any] = []
        yielded: list[Any] = []
        host_tokens = cache(lambda: sum(req.seqlen for req in swapped((*waiting, *yielded))))
        try:
            if full and not self._anyone_yields(requests, waiting[0]):
                return entering, yielded
            turns = self._plan(running_batch, requests, waiting, host_tokens)
        except Exception:
            self._ranker.failed("plan who yields")
            turns = []
        if not turns and running_batch.is_empty() and is_swapped(waiting[0]):
            return [waiting[0]], []  # there is less to fear than the plan does: nobody else runs
        for req, turn in zip(waiting, turns, strict=False):
            if full and not turn.yielding:
                break
            for job in turn.yielding:
                victim = requests[job]
                if not self.mover.leave(running_batch, victim, host_tokens()):
                    self._plan_again(running_batch)
                    return entering, yielded
                yielded.append(victim)
                host_tokens.cache_clear()
            entering.append(req)
        return entering, yielded

    def _anyone_yields(self, running: Iterable[Job], first: Any) -> bool:
        """Whether a running job would, for nothing, to the first of the waiting: in most passes
        none would, and all else is spared."""
        if not _may_claim(first):
            return False
        policy, served_tokens = self._ranker.policy, self._ranker.served_tokens
        newcomer = first.sage_job
        key = policy.key(newcomer, served_tokens)
        return any(
            policy.key(job, served_tokens) > key
            and policy.yields(job, newcomer, served_tokens, 0.0)
            for job in running
        )

    def _plan(
        self,
        running_batch: Any,
        requests: Mapping[Job, Any],
        waiting: Sequence[Any],
        host_tokens: Callable[[], int],
    ) -> list[Turn]:
        scheduler = self._scheduler
        set_aside = self._admission.foresee(
            running_batch.reqs, scheduler.new_token_ratio_tracker.current, scheduler.page_size
        )
        room = (
            scheduler.token_to_kv_pool_allocator.available_size()
            + scheduler.tree_cache.evictable_size()
            - int(sum(set_aside))
        )
        aside = {
            req.sage_job: int(tokens)
            for req, tokens in zip(running_batch.reqs, set_aside, strict=True)
        }

        def departure(job: Job) -> Departure | None:
            req = requests[job]
            if not can_leave_now(req) or not self._survives(req):
                return None
            price_s = self.mover.price_s(req, host_tokens())
            if price_s is None:
                return None
            return Departure(price_s, freed_tokens(scheduler, req) + aside[job])

        ranked = takewhile(_may_claim, islice(waiting, PLAN_WINDOW))
        return plan_turns(
            requests,
            [Claimant(req.sage_job, self._demand(req)) for req in ranked],
            free_slots=scheduler.get_num_allocatable_reqs(
                len(running_batch.reqs), running_batch=running_batch
            ),
            free_tokens=room,
            policy=self._ranker.policy,
            served_tokens=self._ranker.served_tokens,
            max_yields=self._max_yields,
            departure=departure,
        )

    def _survives(self, req: Any) -> bool:
        """Whether all that a request uses is known to survive a swap."""
        if not hasattr(req, "sage_stays"):
            req.sage_stays = why_it_stays(req)
            if req.sage_stays is not None:
                if req.sage_stays not in self.num_staying:
                    logger.info("requests that use %s do not yield", req.sage_stays)
                self.num_staying[req.sage_stays] += 1
        return req.sage_stays is None

    def _demand(self, req: Any) -> int:
        """What admission asks for it, but for a prefix that the radix tree may have."""
        tokens: int = req.seqlen + self._admission.left_tokens(req) + self._scheduler.page_size
        return tokens


def _may_claim(req: Any) -> bool:
    """Whether others may have to yield to a waiting request. Not to one of a session, which keeps
    its memory after its answer: they might never get theirs back."""
    return req.sage_job is not None and req.session is None
