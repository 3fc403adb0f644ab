"""How long a scheduler takes to admit a request, to sort its waiting queue, and for a whole pass:
to sort, to foresee what running requests will still need, and to plan who yields.

`python -m bench.overhead.queue_pass` times patches/ranker.py and patches/turns.py, the code that
the scheduler runs, on requests with predicted lengths, and prints a table. No server is needed.
"""

from __future__ import annotations

import time
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

QUEUE_LENGTHS = (100, 1_000, 10_000)
NUM_RUNNING = 256
_NUM_PASSES = 50
_KV_POOL_TOKENS = 500_000


class _Request:
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
            _Request(generator, config.predictor.max_atoms)
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


def _timed_ms(action: Any) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def measure(num_waiting: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each admission, and of each pass with one newcomer since the last."""
    config = SageConfig()
    generator = np.random.default_rng(num_waiting)
    ranks = ranker(config)
    requests = [
        _Request(generator, config.predictor.max_atoms) for _ in range(num_waiting + _NUM_PASSES)
    ]
    admissions_ms = [_timed_ms(lambda req=req: ranks.arrived(req)) for req in requests]
    queue, newcomers = requests[:num_waiting], requests[num_waiting:]
    ranks.sort(queue)
    passes_ms = []
    for newcomer in newcomers:
        del queue[0]
        queue.append(newcomer)
        passes_ms.append(_timed_ms(lambda: ranks.sort(queue)))
    return admissions_ms, passes_ms


def measure_turns(num_waiting: int) -> list[float]:
    """Milliseconds of all that is ours in a pass: the queue sorted, the running requests' needs
    foreseen, and who yields to whom."""
    server = FullServer(num_waiting, _NUM_PASSES)
    spent_ms = []
    for _ in range(_NUM_PASSES):
        server.step()
        spent_ms.append(_timed_ms(server.take_turns))
    return spent_ms


def main() -> None:
    print(
        f"ms, median and p99     admission           sorting    a whole pass, {NUM_RUNNING} running"
    )
    for num_waiting in QUEUE_LENGTHS:
        columns = [*measure(num_waiting), measure_turns(num_waiting)]
        cells = (f"{np.median(ms):8.3f} {np.quantile(ms, 0.99):8.3f}" for ms in columns)
        print(f"{num_waiting:7,d} waiting", *cells)


if __name__ == "__main__":
    main()
