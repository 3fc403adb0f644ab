"""How long a scheduler takes to note a request, and for a whole pass: the view of its facts, the
order, what running requests will still need, and who yields.

`python -m bench.queue_pass` times patches/scheduler_state.py, the code that the scheduler runs, on
requests with predicted lengths, and prints a table. No server is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from patches.carrier import encode
from patches.preemption import Preemption
from patches.scheduler_state import SchedulerState
from sage_sched.config import PredictorConfig, PreemptionConfig, SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.order import serving_order

QUEUE_LENGTHS = (100, 1_000, 10_000)
NUM_RUNNING = 256
_NUM_PASSES = 50
_KV_POOL_TOKENS = 500_000
_OFF = PreemptionConfig(enabled=False)
_NO_HOST_MEMORY = PreemptionConfig(host_pool_gib=1e-9)


class _Request:
    """What our hooks read of a request (sglang/srt/managers/schedule_batch.py, Req)."""

    to_finish = session = lock = None
    rid = "a request"
    cached_tokens = 0

    def __init__(self, generator: np.random.Generator) -> None:
        lengths = generator.lognormal(5.5, 1.0, PredictorConfig().max_atoms).astype(np.int64) + 1
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
    """A scheduler whose slots are full of the best by the policy, with others waiting.

    What is free is set aside for those that run. Where one is to yield it cannot, as there is no
    room in host memory: what a move takes is no part of a decision.
    """

    def __init__(self, num_waiting: int, num_newcomers: int) -> None:
        generator = np.random.default_rng(num_waiting)
        requests: list[Any] = [
            _Request(generator) for _ in range(NUM_RUNNING + num_waiting + num_newcomers)
        ]
        self.batch = SimpleNamespace(reqs=[], batch_is_full=True, is_empty=lambda: False)
        self._free_tokens = 0
        self.scheduler = self._stand_in()
        self.state = state = SchedulerState(self.scheduler, SageConfig(preemption=_OFF))
        state.preemption = Preemption(
            self.scheduler, _NO_HOST_MEMORY, state.steps, SageConfig().step_time.step_time()
        )
        self.arrivals_ms = [_timed_ms(partial(state.jobs.arrived, req)) for req in requests]
        view = replace(state.view(self.batch), waiting=[req.sage.job for req in requests])
        requests = [requests[place] for place in serving_order(state.policy, view)]
        self.batch.reqs, waiting = requests[:NUM_RUNNING], requests[NUM_RUNNING:]
        self._newcomers = [
            waiting.pop(int(generator.integers(len(waiting)))) for _ in range(num_newcomers)
        ]
        self.scheduler.waiting_queue = waiting
        for request in self.batch.reqs:
            request.output_ids = [0] * int(generator.integers(1, 500))
        running = state.jobs.running(self.batch.reqs)
        self._free_tokens = int(sum(state.admission.set_aside_tokens(running, 0.5, 1)))

    def _stand_in(self) -> Any:
        """What we read of a scheduler."""
        pool = MHATokenToKVPool(64, 1, torch.float32, 1, 8, 1, "cpu", enable_memory_saver=False)
        allocator = TokenToKVPoolAllocator(64, torch.float32, "cpu", pool, False)
        allocator.available_size = lambda: self._free_tokens
        return SimpleNamespace(
            schedule_policy="sage",
            max_total_num_tokens=_KV_POOL_TOKENS,
            max_running_requests=NUM_RUNNING,
            waiting_queue=[],
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
        for request in self.batch.reqs:
            request.output_ids.append(0)
        del self.scheduler.waiting_queue[0]
        self.scheduler.waiting_queue.append(self._newcomers.pop())
        self.state.jobs.num_arrivals += 1

    def take_pass(self) -> list[Any]:
        """All that is ours in a pass; the queue after it."""
        plan = self.state.plan(self.batch)
        queue = [self.scheduler.waiting_queue[place] for place in plan.order or ()]
        self.scheduler.waiting_queue = queue
        return queue


def _timed_ms(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return (time.perf_counter() - started_s) * 1e3


def measure(num_waiting: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each arrival, and of each pass with one newcomer since the last."""
    server = FullServer(num_waiting, _NUM_PASSES)
    passes_ms = []
    for _ in range(_NUM_PASSES):
        server.step()
        passes_ms.append(_timed_ms(server.take_pass))
    return server.arrivals_ms, passes_ms


def main() -> None:
    print(f"ms, median and p99       arrival    a whole pass, {NUM_RUNNING} running")
    for num_waiting in QUEUE_LENGTHS:
        columns = measure(num_waiting)
        cells = (f"{np.median(ms):8.3f} {np.quantile(ms, 0.99):8.3f}" for ms in columns)
        print(f"{num_waiting:7,d} waiting", *cells)


if __name__ == "__main__":
    main()
