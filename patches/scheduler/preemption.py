"""Preempts running requests of this server, and resumes them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler import kv_copy, view
from patches.scheduler.copies import Copies, host_tier_tokens, token_bytes
from patches.scheduler.host_memory import pool_bytes
from patches.scheduler.survival import (
    lost_by_retraction,
    why_none_is_preemptible,
    why_not_preemptible,
)
from patches.scheduler.swap_meter import SwapMeter
from sage_sched.app.config import PreemptionConfig
from sage_sched.app.switch import Settings
from sage_sched.plan import Preempt, PreemptionMode
from sage_sched.view import Holding

logger = logging.getLogger(__name__)

# Unless configured, no more is pinned than this. Pinning takes a second for 6 GiB.
_MOST_PINNED_BYTES = 2**34
_COUNTED = ("num_resumed", "num_recomputed", "num_without_device_room", "num_without_host_room")


def preemption_of(
    scheduler: Scheduler, settings: Settings, present: Preemption | None
) -> Preemption | None:
    """Return the preemption of these settings; None if preemption is off or this server cannot
    swap. No request is preempted under one of SGLang's own policies.

    present: the present preemption, if any. It is kept and follows the new settings, because it may
        hold copies.
    """
    config = settings.config.preemption
    config = replace(config, enabled=config.enabled and not settings.is_stock)
    if present is not None:
        present.use(config)
        return present
    if not config.enabled or view.only_prefills(scheduler):
        return None
    if reason := why_none_is_preemptible(scheduler):
        logger.warning("running requests cannot be preempted on this server: it has %s", reason)
        return None
    return Preemption(scheduler, config)


class Preemption:
    """Preempts and resumes the requests of one scheduler.

    A request that comes back joins the batch one pass after its copy has set out, on all ranks.
    Until then it waits in the queue, and keeps its copy.

    num_preemptions: the number of preemptions by reason and by mode. The reason is True if memory
        ran out, and False if a waiting request took the place.
    host_pool_tokens: KV for which host memory has room in all.
    meter: measures the cost of moving a token.
    counts: of other events.
    returning: the requests that join at the next pass. They have rows and slots.
    """

    def __init__(self, scheduler: Scheduler, config: PreemptionConfig) -> None:
        self._scheduler = scheduler
        self._only_decodes = view.only_decodes(scheduler)
        self._token_bytes = token_bytes(scheduler)
        own_bytes = kv_copy.least(scheduler, pool_bytes(scheduler.server_args))
        self._own_pool_bytes = min(own_bytes, _MOST_PINNED_BYTES)
        self._copies, self._most_tokens = self._with_host_memory(config)
        self.meter = SwapMeter(scheduler, scheduler.sage.calibration, self._copies)
        self.returning: list[Req] = []
        self.num_preemptions: Counter[tuple[bool, PreemptionMode]] = Counter()
        self._num_staying: Counter[str] = Counter()
        self.counts = Counter(dict.fromkeys(_COUNTED, 0))
        self.use(config)

    def use(self, config: PreemptionConfig) -> None:
        """Follow these settings from now on. KV in host memory stays there. If preemption is now
        off, swapped-out requests come back."""
        self.config = config
        tier_tokens = host_tier_tokens(self._scheduler)
        own_tokens = min(self._own_tokens(config), self._most_tokens)
        self.host_pool_tokens = own_tokens if tier_tokens is None else tier_tokens

    def _own_tokens(self, config: PreemptionConfig) -> int:
        own_bytes = int(config.host_pool_gib * 2**30) or self._own_pool_bytes
        return own_bytes // self._token_bytes

    def _with_host_memory(self, config: PreemptionConfig) -> tuple[Copies, int]:
        """Return an empty store for copies, and its size in tokens: 0 if some rank lacks the
        memory."""
        num_tokens = self._own_tokens(config)
        try:
            copies = Copies(self._scheduler, num_tokens)
            has_memory = True
        except (RuntimeError, MemoryError):
            logger.exception("no host memory for the KV of preempted requests")
            has_memory = False
        if kv_copy.least(self._scheduler, has_memory):
            return copies, num_tokens
        return Copies(self._scheduler, 0), 0

    def stats(self) -> dict[str, Any]:
        """Return counters for /server_info.

        num_not_preemptible: requests that were chosen but cannot be preempted, by the feature that
            they use.
        swap_token_us: estimated cost of moving a token one way.
        """
        return {
            "num_preemptions": self.num_preemptions.total(),
            "num_out_of_memory": sum(self.num_preemptions[True, way] for way in PreemptionMode),
            "num_left_in_tree": sum(
                self.num_preemptions[short, PreemptionMode.RECOMPUTE] for short in (True, False)
            ),
            "host_pool_gib": self.host_pool_tokens * self._token_bytes / 2**30,
            "host_pool_tokens": self.host_pool_tokens,
            **self.counts,
            "swapped_bytes": self.meter.total_tokens * self._token_bytes,
            "swapped_s": self.meter.total_s,
            "swap_token_us": 1e6 * self.meter.token_s,
            "num_not_preemptible": dict(self._num_staying),
        }

    def used_ratio(self) -> float:
        """Return the used share of the host memory."""
        used_tokens = sum(req.seqlen for req in view.in_host_memory(self._scheduler))
        return used_tokens / max(1, self.host_pool_tokens)

    def holding(self, req: Req) -> Holding | None:
        """Return the KV that a running request holds; None if it cannot be preempted."""
        if not kv_copy.can_be_preempted_now(req) or not self._survives(req):
            return None
        return Holding(
            kv_tokens=req.seqlen,
            # It will find the same prefix in the radix tree as at its start.
            cached_tokens=min(req.cached_tokens, req.seqlen),
            freed_tokens=kv_copy.freed_tokens(self._scheduler, req),
            stays_whole=self._only_decodes or lost_by_retraction(req) is not None,
        )

    def _survives(self, req: Req) -> bool:
        """Whether everything that a request uses is known to survive a swap."""
        state = req.sage
        if not state.was_checked:
            state.was_checked = True
            reason = why_not_preemptible(req)
            if self._only_decodes and reason is None:
                reason = kv_copy.lost_part(req)
            state.why_not_preemptible = reason
            if reason is not None:
                if reason not in self._num_staying:
                    logger.info("requests that use %s cannot be preempted", reason)
                self._num_staying[reason] += 1
        return state.why_not_preemptible is None

    def preempt(self, running_batch: Batch, actions: Sequence[Preempt]) -> list[Req]:
        """Preempt running requests and return them, up to the first whose copy fails on some rank;
        it keeps running. A request without a place in host memory leaves its KV in the radix tree,
        or keeps running if its answer could not be continued then."""
        of_job = {req.sage.job: req for req in running_batch.reqs}
        reqs = [of_job[action.job] for action in actions]
        gone = reqs[: self._num_copied(reqs, actions)]
        for req, action in zip(gone, actions, strict=False):
            mode = PreemptionMode.RECOMPUTE
            if view.is_swapped(req):
                mode = PreemptionMode.SWAP
                # It comes back with all of its KV.
                self._scheduler.sage.session_kv.mark(req, "")
                kv_copy.leave(self._scheduler, running_batch, req)
            else:
                kv_copy.preempt_to_tree(self._scheduler, running_batch, req)
            req.sage.job.num_preemptions += 1
            req.sage.waits.begins()
            self.num_preemptions[action.to is None, mode] += 1
        return gone

    def _num_copied(self, reqs: Sequence[Req], actions: Sequence[Preempt]) -> int:
        """Copy the KV of requests that are to be swapped out. Return how many may leave: all before
        the first whose copy fails on some rank."""
        swaps = [action.mode is PreemptionMode.SWAP for action in actions]
        if not any(swaps):
            return len(reqs)
        num_copied = 0
        with self.meter.timing() as move:
            for req, is_swap in zip(reqs, swaps, strict=True):
                if is_swap and not self._copies.take(req):
                    break
                if is_swap and not view.is_swapped(req) and lost_by_retraction(req):
                    break  # its answer would not go on after a prefill
                num_copied += 1
            num_gone = kv_copy.least(self._scheduler, num_copied)
            move.num_tokens = sum(r.seqlen - 1 for r in reqs[:num_gone] if view.is_swapped(r))
        for req in reqs[num_gone:]:
            self._copies.drop(req)
        if num_gone < len(reqs):
            logger.warning("a copy to host memory failed on some rank; the request goes on running")
        return num_gone

    def resume(self, running_batch: Batch, reqs: Sequence[Req]) -> list[Req]:
        """Let swapped-out requests come back. Return the requests for which the device has no room.

        They join the batch at the next pass. Trap: call this only if none of them was swapped out
        since the last step was launched. Otherwise a result in flight would be taken for a result
        of a request that has come back.
        """
        for number, req in enumerate(reqs):
            others = [*running_batch.reqs, *self.returning]
            if not kv_copy.take_room(self._scheduler, req, others):
                self.counts["num_without_device_room"] += len(reqs) - number
                return [*reqs[number:]]
            self._copies.fetch(req)
            self.returning.append(req)
        return []

    def join(self, running_batch: Batch) -> Batch:
        """Put the requests that come back into the running batch, and return it. If a copy cannot
        be written back on some rank, its request will be recomputed."""
        coming, self.returning = self.returning, []
        scheduler, names = self._scheduler, {id(req) for req in coming}
        waiting = [req for req in scheduler.waiting_queue if id(req) not in names]
        with self.restoring() as back:
            num_done = 0
            while num_done < len(coming) and self._copies.put_back(coming[num_done]):
                num_done += 1
            back += coming[: kv_copy.least(scheduler, num_done)]
        lost = coming[len(back) :]
        for req in lost:
            kv_copy.give_room_back(scheduler, req)
            self._copies.drop(req)
        self.counts["num_recomputed"] += len(lost)
        if lost:  # there is free room
            running_batch.batch_is_full = False
            scheduler.sage.core.plan_again()
        scheduler.waiting_queue = [*lost, *waiting]
        batch = kv_copy.resumed(scheduler, back)
        if batch is None:
            return running_batch
        if running_batch.is_empty():
            return batch
        running_batch.merge_batch(batch)
        return running_batch

    def recall(self) -> None:
        """Take the requests that come back off the device again. They wait on, with their
        copies."""
        if self.returning:
            self._scheduler.sage.core.plan_again()
        for req in self.returning:
            self._copies.stay(req)
            kv_copy.give_room_back(self._scheduler, req)
        self.returning = []

    def aborted(self, req: Req) -> None:
        """Drop the KV of an aborted waiting request, in host memory and on the device."""
        if req in self.returning:
            self.returning.remove(req)
            kv_copy.give_room_back(self._scheduler, req)
        self._copies.drop(req)

    @contextmanager
    def restoring(self) -> Iterator[list[Req]]:
        """Time and count copies back to the device within this context. The caller adds the resumed
        requests to the list that it gets."""
        back: list[Req] = []
        with self.meter.timing() as move:
            yield back
            move.num_tokens = sum(req.seqlen - 1 for req in back)
        self.counts["num_resumed"] += len(back)
        for req in back:
            req.sage.waits.ends()

    def forget_copies(self) -> None:
        """Drop all copies: KV of old weights, or of a flushed cache, must not come back. The flush
        has already freed their share of the hierarchical cache."""
        for req in view.in_host_memory(self._scheduler):
            self._copies.drop(req, flushed=True)
            self.counts["num_recomputed"] += 1
