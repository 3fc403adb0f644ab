"""Before each admission pass of a scheduler: running requests yield, swapped ones come back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from patches.ranker import Ranker
from patches.swap import (
    can_swap,
    counts_tokens,
    drop,
    is_swapped,
    leave_in_tree,
    swap_in,
    swap_out,
    token_bytes,
    why_not,
)
from sage_sched.config import PreemptionConfig
from sage_sched.plan import PLAN_WINDOW, Claimant, Holder, Turn, plan_turns
from sage_sched.policy import Policy

logger = logging.getLogger(__name__)


def turn_taker(scheduler: Any, ranker: Ranker, config: PreemptionConfig) -> TurnTaker | None:
    """None where the policy never preempts, or is not to, or this server cannot swap."""
    if not config.enabled or type(ranker.policy).yields is Policy.yields:
        return None
    if reason := why_not(scheduler):
        logger.warning("running requests do not yield here: no swapping with %s", reason)
        return None
    return TurnTaker(scheduler, ranker, config)


class TurnTaker:
    """One scheduler's preemption.

    Decides by what all tensor-parallel ranks have in common: jobs, tokens, pool, slots.
    """

    def __init__(self, scheduler: Any, ranker: Ranker, config: PreemptionConfig) -> None:
        self._scheduler = scheduler
        self._ranker = ranker
        self._config = config
        self._token_bytes = token_bytes(scheduler)
        self._budget_tokens = int(config.host_pool_gib * 2**30) // self._token_bytes
        self._num_arrivals_planned = -1
        self._num_yields = 0
        self._num_resumed = 0
        self._num_recomputed = 0
        self._num_left_in_tree = 0
        self._num_without_room = 0
        self._moved_tokens = 0

    def stats(self) -> dict[str, int]:
        """Counters for /server_info."""
        return {
            "num_yields": self._num_yields,
            "num_resumed": self._num_resumed,
            "num_left_in_tree": self._num_left_in_tree,
            "num_recomputed": self._num_recomputed,
            "num_without_host_room": self._num_without_room,
            "swapped_bytes": self._moved_tokens * self._token_bytes,
        }

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
        back = [req for req in entering if is_swapped(req)]
        rest = waiting[len(entering) :]
        self._scheduler.waiting_queue = fresh + rest + yielded
        if back:
            running_batch = self._resume(running_batch, back)
        if full and not entering:
            return self._pass(original, running_batch, [])
        if full:
            running_batch.batch_is_full = False
            plan = self._pass(original, running_batch, fresh)
            left_out = any(req in self._scheduler.waiting_queue for req in fresh)
            plan.running_batch.batch_is_full |= not left_out
            return plan
        behind = takewhile(lambda req: not is_swapped(req), rest)
        return self._pass(original, running_batch, [*fresh, *behind])

    def without_swapped(self, original: Callable[[], Any]) -> Any:
        """Call something that must not see swapped requests: they are not waiting for a start."""
        waiting = [req for req in self._scheduler.waiting_queue if not is_swapped(req)]
        return self._hiding(original, waiting)

    def forget_copies(self) -> None:
        """The KV of old weights, or of a flushed cache, is not to come back."""
        for req in filter(is_swapped, self._scheduler.waiting_queue):
            drop(self._scheduler, req)
            self._num_recomputed += 1

    def _pass(self, original: Callable[[Any], Any], running_batch: Any, visible: list[Any]) -> Any:
        return self._hiding(lambda: original(running_batch), visible)

    def _hiding(self, original: Callable[[], Any], visible: list[Any]) -> Any:
        scheduler = self._scheduler
        shown = {id(req) for req in visible}
        hidden = [req for req in scheduler.waiting_queue if id(req) not in shown]
        scheduler.waiting_queue = visible
        try:
            return original()
        finally:
            scheduler.waiting_queue = scheduler.waiting_queue + hidden

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
        requests = {req.sage_job: req for req in running_batch.reqs}
        entering: list[Any] = []
        yielded: list[Any] = []
        host_tokens = sum(req.seqlen for req in waiting if is_swapped(req))
        turns = self._plan(running_batch, waiting, host_tokens)
        if not turns and running_batch.is_empty() and is_swapped(waiting[0]):
            return [waiting[0]], []  # it fitted before; no one else holds anything
        for req, turn in zip(waiting, turns, strict=False):
            if full and not turn.yielding:
                break
            for job in turn.yielding:
                victim = requests[job]
                if self._swaps(victim, host_tokens):
                    if not swap_out(self._scheduler, running_batch, victim):
                        return entering, yielded
                    host_tokens += victim.seqlen
                    self._moved_tokens += victim.seqlen - 1
                elif self._stays_put(victim):
                    self._num_without_room += 1
                    return entering, yielded
                else:
                    leave_in_tree(self._scheduler, running_batch, victim)
                    self._num_left_in_tree += 1
                victim.sage_job.num_yields += 1
                self._num_yields += 1
                yielded.append(victim)
            entering.append(req)
        return entering, yielded

    def _swaps(self, req: Any, host_tokens: int) -> bool:
        """Whether it goes to host memory, of which host_tokens are taken."""
        server = self._ranker.policy.server
        cheaper = server.swap_s(req.seqlen) <= server.recompute_s(req.seqlen)
        return host_tokens + req.seqlen <= self._budget_tokens and (cheaper or self._stays_put(req))

    def _stays_put(self, req: Any) -> bool:
        """Whether it may not be computed again."""
        return self._config.swap_only or counts_tokens(req)

    def _plan(self, running_batch: Any, waiting: Sequence[Any], host_tokens: int) -> list[Turn]:
        scheduler = self._scheduler
        server = self._ranker.policy.server
        ratio = scheduler.new_token_ratio_tracker.current
        room = (
            scheduler.token_to_kv_pool_allocator.available_size()
            + scheduler.tree_cache.evictable_size()
        )
        running = []
        for req in running_batch.reqs:
            reserved = int(self._tokens_to_come(req) * (_ratio(req, ratio)))
            room -= reserved
            if req.sage_job is not None and can_swap(req):
                req.sage_job.generated_tokens = len(req.output_ids)
                # What it found in the radix tree at its start, others may hold too.
                own_tokens = req.kv.kv_allocated_len - req.cached_tokens
                swaps = self._swaps(req, host_tokens)
                move_s = (server.swap_s if swaps else server.recompute_s)(req.seqlen)
                running.append(Holder(req.sage_job, max(0, own_tokens) + reserved, move_s))
        ranked = takewhile(lambda req: req.sage_job is not None, islice(waiting, PLAN_WINDOW))
        return plan_turns(
            running,
            [Claimant(req.sage_job, self._demand(req)) for req in ranked],
            free_slots=scheduler.get_num_allocatable_reqs(
                len(running_batch.reqs), running_batch=running_batch
            ),
            free_tokens=room,
            policy=self._ranker.policy,
            served_tokens=self._ranker.served_tokens,
            max_yields=self._config.max_yields,
        )

    def _tokens_to_come(self, req: Any) -> int:
        left = req.sampling_params.max_new_tokens - len(req.output_ids)
        return int(min(max(left, 0), CLIP_MAX_NEW_TOKENS))

    def _demand(self, req: Any) -> int:
        """What SGLang's admission asks for it, but for a prefix that the radix tree may have."""
        tokens: int = req.seqlen + self._tokens_to_come(req) + self._scheduler.page_size
        return tokens

    def _resume(self, running_batch: Any, reqs: Sequence[Any]) -> Any:
        batch = swap_in(self._scheduler, reqs)
        lost = [req for req in reqs if batch is None or req not in batch.reqs]
        self._num_recomputed += len(lost)
        self._scheduler.waiting_queue = [*lost, *self._scheduler.waiting_queue]
        if batch is None:
            return running_batch
        self._num_resumed += len(batch.reqs)
        self._moved_tokens += sum(req.seqlen - 1 for req in batch.reqs)
        if running_batch.is_empty():
            return batch
        running_batch.merge_batch(batch)
        return running_batch


def _ratio(req: Any, ratio: float) -> float:
    # SGLang: fixed-length requests cannot benefit from the early-EOS estimate.
    return 1.0 if req.sampling_params.ignore_eos else ratio
