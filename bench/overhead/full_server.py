"""A stand-in for a scheduler whose slots are full: what queue_pass.py times and tests put to use.

Of a scheduler and its requests it has what our hooks read, so no server is needed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from patches.admission import Admission
from patches.carrier import encode
from patches.ranker import Ranker
from patches.turns import TurnTaker
from sage_sched.config import PreemptionConfig, SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.step_time import ServerFacts

NUM_RUNNING = 256
_KV_POOL_TOKENS = 500_000


class StandInRequest:
    """What our hooks read of a request (sglang/srt/managers/schedule_batch.py, Req)."""

    to_finish = session = lock = None
    sage_stays = None  # it uses nothing that would not survive a swap
    rid = "a request"
    cached_tokens = 0

    def __init__(self, generator: np.random.Generator, max_atoms: int) -> None:
        lengths = generator.lognormal(5.5, 1.0, max_atoms).astype(np.int64) + 1
        self.origin_input_ids = range(int(generator.integers(10, 2000)))
        self.output_ids: list[int] = []
        self.sampling_params = SimpleNamespace(
            max_new_tokens=4096,
            custom_params=encode(LengthDistribution.from_samples(lengths, "warm")),
            ignore_eos=False,
        )
        self.kv = SimpleNamespace(
            kv_allocated_len=500, cache_protected_len=0, retraction_backup=None
        )

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return False

    def next_output_finishes_by_length(self) -> bool:
        cap: int = self.sampling_params.max_new_tokens
        return len(self.output_ids) + 1 >= cap


class FullServer:
    """A scheduler's turns, its slots full of the best by the policy, others waiting.

    What is free is set aside for those that run. Where one is to yield it cannot, as there is no
    room in host memory: what a move takes is no part of a decision.
    """

    def __init__(self, num_waiting: int, num_newcomers: int) -> None:
        config = SageConfig(
            preemption=PreemptionConfig(enabled=True, host_pool_gib=1e-9, swap_only=True)
        )
        generator = np.random.default_rng(num_waiting)
        self.ranker = ranker(config)
        requests = [
            StandInRequest(generator, config.predictor.max_atoms)
            for _ in range(NUM_RUNNING + num_waiting + num_newcomers)
        ]
        for request in requests:
            self.ranker.arrived(request)
        self.ranker.sort(requests)
        self.running, self.waiting = requests[:NUM_RUNNING], requests[NUM_RUNNING:]
        self._newcomers = [
            self.waiting.pop(int(generator.integers(len(self.waiting))))
            for _ in range(num_newcomers)
        ]
        for request in self.running:
            request.output_ids = [0] * int(generator.integers(1, 500))
        admission = Admission(config.policy.admission_quantile)
        free_tokens = int(sum(admission.foresee(self.running, 0.5, page_size=1)))
        self.batch = SimpleNamespace(reqs=self.running, batch_is_full=True, is_empty=lambda: False)
        self.scheduler = self._stand_in(free_tokens)
        self.turns = TurnTaker(self.scheduler, self.ranker, admission, config.preemption)

    def _stand_in(self, free_tokens: int) -> Any:
        """What our hooks read of a scheduler."""
        pool = MHATokenToKVPool(64, 1, torch.float32, 1, 8, 1, "cpu", enable_memory_saver=False)
        allocator = TokenToKVPoolAllocator(64, torch.float32, "cpu", pool, False)
        allocator.available_size = lambda: free_tokens
        return SimpleNamespace(
            waiting_queue=self.waiting,
            chunked_req=None,
            page_size=1,
            device="cpu",
            new_token_ratio_tracker=SimpleNamespace(current=0.5),
            token_to_kv_pool_allocator=allocator,
            tree_cache=SimpleNamespace(evictable_size=lambda: 0),
            tp_group=SimpleNamespace(broadcast_object=lambda measured: measured),
            get_num_allocatable_reqs=lambda num_running, running_batch: 0,
        )

    def step(self) -> None:
        """A token for all that run; the first in the queue gets a place elsewhere, one arrives."""
        for request in self.running:
            request.output_ids.append(0)
        del self.scheduler.waiting_queue[0]
        self.scheduler.waiting_queue.append(self._newcomers.pop())
        self.ranker.num_arrivals += 1

    def take_turns(self) -> list[Any]:
        """All that is ours in a pass; the queue after it."""
        self.turns.take_turns(lambda batch: None, self.batch)
        queue: list[Any] = self.scheduler.waiting_queue
        return queue


def ranker(config: SageConfig) -> Ranker:
    server = ServerFacts(_KV_POOL_TOKENS, NUM_RUNNING, config.step_time.step_time(), 0.0)
    return Ranker("sage", config.policy, server)
