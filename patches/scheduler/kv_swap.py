"""How a running request leaves the device and comes back, and what that costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.calibration import Calibration
from patches.scheduler.host_memory import pool_bytes
from patches.scheduler.kv_copy import (
    Return,
    drop,
    least,
    leave_in_tree,
    swap_in,
    swap_out,
    swapped,
    token_bytes,
)
from sage_sched.plan import Way
from sage_sched.steps import ServerFacts

# At start-up this many tokens are moved there and back; the fastest round counts.
_TRIAL_TOKENS, _TRIAL_ROUNDS = 1024, 3
# Ranks agree anew after this many moves.
_MOVES_PER_ROUND = 16


class KvSwap:
    """Swapping on one scheduler.

    num_yields: how many requests left, by whether memory ran out (else they yielded to a waiting
    request) and by way.
    """

    def __init__(
        self, scheduler: Scheduler, host_pool_gib: float, calibration: Calibration
    ) -> None:
        self._scheduler = scheduler
        self._token_bytes = token_bytes(scheduler)
        self._own_pool_bytes = least(scheduler, pool_bytes(scheduler.server_args))
        self.resize(host_pool_gib)
        self._meter = SwapMeter(scheduler, calibration)
        self.num_yields: Counter[tuple[bool, Way]] = Counter()
        self._num_resumed = 0
        self._num_recomputed = 0
        self._num_without_device_room = 0
        self._moved_tokens = 0

    def resize(self, host_pool_gib: float) -> None:
        """From now on use this much host memory (0: the share chosen at the start). What is in it
        stays."""
        pool_bytes = int(host_pool_gib * 2**30) or self._own_pool_bytes
        self._host_pool_tokens = pool_bytes // self._token_bytes

    def stats(self) -> dict[str, float]:
        """Counters for /server_info. swap_token_us: estimated cost of moving a token one way."""
        return {
            "num_yields": self.num_yields.total(),
            "num_out_of_memory": sum(self.num_yields[True, way] for way in Way),
            "num_left_in_tree": sum(self.num_yields[short, Way.LEAVE] for short in (True, False)),
            "num_resumed": self._num_resumed,
            "host_pool_gib": self._host_pool_tokens * self._token_bytes / 2**30,
            "host_pool_tokens": self._host_pool_tokens,
            "num_recomputed": self._num_recomputed,
            "num_without_device_room": self._num_without_device_room,
            "swapped_bytes": self._moved_tokens * self._token_bytes,
            "swapped_s": self._meter.total_s,
            "swap_token_us": 1e6 * self._meter.token_s,
        }

    def host_free_tokens(self, in_host_memory: Iterable[Req]) -> int:
        """KV tokens that host memory still has room for, given the swapped requests."""
        return self._host_pool_tokens - sum(req.seqlen for req in in_host_memory)

    def used_ratio(self) -> float:
        """Share of the host memory that is used."""
        free_tokens = self.host_free_tokens(swapped(self._scheduler.waiting_queue))
        return 1 - free_tokens / max(1, self._host_pool_tokens)

    def priced(self, server: ServerFacts) -> ServerFacts:
        """The same facts with the measured cost of moving a token, equal on all ranks."""
        return replace(server, swap_token_s=self._meter.token_s)

    def leave(self, running_batch: Batch, req: Req, way: Way, *, is_out_of_memory: bool) -> bool:
        """Take a request off the device. False, and it goes on running, if its copy fails."""
        if way is Way.SWAP:
            num_tokens = req.seqlen - 1
            with self._meter.timing() as move:
                gone = swap_out(self._scheduler, running_batch, req)
                move.num_tokens = num_tokens if gone else 0
            if not gone:
                return False
            self._moved_tokens += num_tokens
        else:
            leave_in_tree(self._scheduler, running_batch, req)
        req.sage.job.num_yields += 1
        req.sage.waits.begins()
        self.num_yields[is_out_of_memory, way] += 1
        return True

    def resume(self, running_batch: Batch, reqs: Sequence[Req]) -> tuple[Batch, list[Req]]:
        """Bring swapped requests back: the running batch with them in it, and those that have to
        wait on. Some of these are still swapped, as there is no room for them; the others lost
        their copies and will be computed again."""
        with self._meter.timing() as move:
            batch, outcomes = swap_in(self._scheduler, reqs)
            back = batch.reqs if batch is not None else []
            move.num_tokens = sum(req.seqlen - 1 for req in back)
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
        """Drop all copies: KV of old weights, or of a flushed cache, must not come back."""
        for req in swapped(self._scheduler.waiting_queue):
            drop(self._scheduler, req)
            self._num_recomputed += 1


@dataclass(slots=True)
class Move:
    """How many KV tokens were moved; 0 if none."""

    num_tokens: int = 0


class SwapMeter:
    """Seconds to move a token one way. Rank 0 measures; all ranks use its figure from the same move
    on.

    They are seconds of the step times, as all costs are: if the server's steps take half as long as
    configured, a move counts twice.

    total_s: all moves so far, on this rank.
    """

    def __init__(self, scheduler: Scheduler, calibration: Calibration) -> None:
        self._scheduler = scheduler
        self._calibration = calibration
        self._num_moves = 0
        self._num_tokens = 0
        self._seconds = 0.0
        self.total_s = 0.0
        self.token_s = self._agreed(_trial_token_s(scheduler))

    @contextmanager
    def timing(self) -> Iterator[Move]:
        """Around moves of KV, either way, on all ranks. The caller says how much it moved."""
        _wait_for_device(self._scheduler)  # a pass in flight is no part of the move
        self._calibration.steps.interrupted()
        move = Move()
        started = time.perf_counter()
        yield move
        if move.num_tokens:
            seconds = time.perf_counter() - started
            self._seconds += seconds
            self.total_s += seconds
            self._num_tokens += move.num_tokens
            self._num_moves += 1
            if self._num_moves % _MOVES_PER_ROUND == 0:
                self._refine()

    def _refine(self) -> None:
        seconds = self._seconds * self._calibration.pace()
        self.token_s = self._agreed(seconds / self._num_tokens)
        # Half of it counts on, so that the figure follows the server without jumping.
        self._seconds /= 2
        self._num_tokens = max(1, self._num_tokens // 2)

    def _agreed(self, token_s: float) -> float:
        return float(self._scheduler.tp_group.broadcast_object(token_s))


def _trial_token_s(scheduler: Scheduler) -> float:
    """Moves slots that nobody uses yet, and writes back what was in them."""
    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    num_tokens: int = min(_TRIAL_TOKENS, pool.size)
    slots = torch.arange(1, num_tokens + 1, device=pool.device)  # 0 is SGLang's padding
    times_s: list[float] = []
    for _ in range(_TRIAL_ROUNDS):
        _wait_for_device(scheduler)
        started = time.perf_counter()
        allocator.load_cpu_copy(allocator.get_cpu_copy(slots), slots)  # returns when it is done
        times_s.append(time.perf_counter() - started)
    return min(times_s) / (2 * num_tokens)


def _wait_for_device(scheduler: Scheduler) -> None:
    torch.get_device_module(scheduler.device).synchronize()
