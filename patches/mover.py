"""How a running request goes, where its KV stays meanwhile, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from patches.ranker import Ranker
from patches.swap import (
    Return,
    counts_tokens,
    drop,
    leave_in_tree,
    swap_in,
    swap_out,
    swapped,
    token_bytes,
)
from patches.swap_meter import SwapMeter
from sage_sched.config import PreemptionConfig
from sage_sched.step_time import ServerFacts


class Mover:
    """One scheduler's. Chooses by what all tensor-parallel ranks have in common: tokens, and what
    the meter has told them."""

    def __init__(self, scheduler: Any, ranker: Ranker, config: PreemptionConfig) -> None:
        self._scheduler = scheduler
        self._ranker = ranker
        self._config = config
        self._token_bytes = token_bytes(scheduler)
        self._budget_tokens = int(config.host_pool_gib * 2**30) // self._token_bytes
        self._meter = SwapMeter(scheduler, ranker.policy.server.step_time)
        self._num_gone = 0
        self._num_resumed = 0
        self._num_recomputed = 0
        self._num_left_in_tree = 0
        self._num_without_host_room = 0
        self._num_without_device_room = 0
        self._moved_tokens = 0
        self._tell_policy()

    def stats(self) -> dict[str, float]:
        """Counters for /server_info, and what a token's move is thought to take, one way."""
        return {
            "num_yields": self._num_gone,
            "num_resumed": self._num_resumed,
            "num_left_in_tree": self._num_left_in_tree,
            "num_recomputed": self._num_recomputed,
            "num_without_host_room": self._num_without_host_room,
            "num_without_device_room": self._num_without_device_room,
            "swapped_bytes": self._moved_tokens * self._token_bytes,
            "swap_token_us": 1e6 * self._meter.token_s,
        }

    def price_s(self, req: Any, host_tokens: int) -> float | None:
        """Seconds that its way out and back would take; None if it has nowhere to go.

        host_tokens: whose KV is in host memory now.
        """
        if self._swaps(req, host_tokens):
            return self._swap_s(req)
        if self._stays_whole(req):
            self._num_without_host_room += 1
            return None
        return self._recompute_s(req)

    def leave(self, running_batch: Any, req: Any, host_tokens: int) -> bool:
        """Take it off the device; False, and it goes on running, if it has nowhere to go or its
        copy fails."""
        if self.price_s(req, host_tokens) is None:
            return False
        if self._swaps(req, host_tokens):
            num_tokens = req.seqlen - 1
            with self._meter.timing() as move:
                gone = swap_out(self._scheduler, running_batch, req)
                move.num_tokens = num_tokens if gone else 0
            self._tell_policy()
            if not gone:
                return False
            self._moved_tokens += num_tokens
        else:
            leave_in_tree(self._scheduler, running_batch, req)
            self._num_left_in_tree += 1
        req.sage_job.num_yields += 1
        self._num_gone += 1
        return True

    def resume(self, running_batch: Any, reqs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Bring swapped requests back: the running batch with them in it, and those that have to
        go on waiting. Of these some are swapped as before, as there is no room for them; the
        others lost their copies, and have to be computed again."""
        with self._meter.timing() as move:
            batch, outcomes = swap_in(self._scheduler, reqs)
            back = batch.reqs if batch is not None else []
            move.num_tokens = sum(req.seqlen - 1 for req in back)
        self._tell_policy()
        self._num_recomputed += outcomes.count(Return.LOST)
        self._num_without_device_room += outcomes.count(Return.NO_ROOM)
        left = [r for r, outcome in zip(reqs, outcomes, strict=True) if outcome is not Return.BACK]
        if batch is None:
            return running_batch, left
        self._num_resumed += len(back)
        self._moved_tokens += move.num_tokens
        if running_batch.is_empty():
            return batch, left
        running_batch.merge_batch(batch)
        return running_batch, left

    def forget_copies(self) -> None:
        """The KV of old weights, or of a flushed cache, is not to come back."""
        for req in swapped(self._scheduler.waiting_queue):
            drop(self._scheduler, req)
            self._num_recomputed += 1

    def _swaps(self, req: Any, host_tokens: int) -> bool:
        """Whether it goes to host memory, or else is left in the radix tree. All of it does: the
        more a prefill computes the more a token takes, so that all or nothing is cheapest."""
        if not self._fits_in_host(req, host_tokens):
            return False
        return self._stays_whole(req) or self._swap_s(req) <= self._recompute_s(req)

    def _fits_in_host(self, req: Any, host_tokens: int) -> bool:
        return host_tokens + int(req.seqlen) <= self._budget_tokens

    def _stays_whole(self, req: Any) -> bool:
        """Whether it may not be computed again."""
        return self._config.swap_only or counts_tokens(req)

    def _swap_s(self, req: Any) -> float:
        return self._server.swap_s(req.seqlen)

    def _recompute_s(self, req: Any) -> float:
        # What it found in the radix tree at its start, it will find again.
        return self._server.recompute_s(req.seqlen, min(req.cached_tokens, req.seqlen))

    @property
    def _server(self) -> ServerFacts:
        return self._ranker.policy.server

    def _tell_policy(self) -> None:
        self._ranker.policy.server = replace(self._server, swap_token_s=self._meter.token_s)
