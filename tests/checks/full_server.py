"""A stand-in for a scheduler whose slots are full: what queue_pass.py times and tests put to use.

Of a scheduler and its requests it has what our hooks read, so no server is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from patches.carrier import encode, encode_hints
from patches.scheduler.executor import run_pass
from patches.scheduler.preemption import Preemption
from patches.scheduler.state import SchedulerState
from predictor_store.predict.predictor import MAX_ATOMS
from sage_sched.app.config import PreemptionConfig, SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.headroom import Headroom
from sage_sched.job import NO_HINTS, Hints
from sage_sched.waiting_queue import place_of

NUM_RUNNING = 256
_KV_POOL_TOKENS = 500_000
_OFF = PreemptionConfig(enabled=False)
_NO_HOST_MEMORY = PreemptionConfig(host_pool_gib=1e-9)


class StandInRequest:
    """What our hooks read of a request (sglang/srt/managers/schedule_batch.py, Req)."""

    to_finish = session = lock = beam_group = None
    extra_key = cache_salt = input_embeds = None
    prefix_len = 0
    rid = "a request"
    cached_tokens = 0
    time_stats = SimpleNamespace(set_wait_queue_entry_time=lambda: None)

    def __init__(self, generator: np.random.Generator, hints: Hints = NO_HINTS) -> None:
        lengths = generator.lognormal(5.5, 1.0, MAX_ATOMS).astype(np.int64) + 1
        num_tokens = int(generator.integers(10, 2000))
        self.origin_input_ids = array("q", generator.integers(0, 1 << 17, num_tokens).tolist())
        self.output_ids = array("q")
        self.sampling_params = SimpleNamespace(
            max_new_tokens=4096,
            custom_params={
                **encode(LengthDistribution.from_samples(lengths, "warm")),
                **encode_hints(hints),
            },
            ignore_eos=False,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            min_new_tokens=0,
        )
        self.kv = SimpleNamespace(
            kv_allocated_len=500, cache_protected_len=0, retraction_backup=None
        )

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return False

    def reset_for_retract(self) -> None:
        self.prefix_len = 0

    def _compute_max_prefix_len(self, num_tokens: int) -> int:
        return num_tokens - 1

    def next_output_finishes_by_length(self) -> bool:
        cap: int = self.sampling_params.max_new_tokens
        return len(self.output_ids) + 1 >= cap


def stand_in_batch(reqs: list[Any]) -> Any:
    """What we read of a running batch (sglang/srt/managers/schedule_batch.py, ScheduleBatch)."""
    batch = SimpleNamespace(
        reqs=reqs, batch_is_full=False, check_decode_mem=lambda: True, filter_batch=lambda: None
    )
    batch.is_empty = lambda: not batch.reqs
    batch.new_tokens_required_next_decode = lambda: len(batch.reqs)
    return batch


def stand_in_scheduler(free_tokens: Callable[[], int], policy: str = "sage") -> Any:
    """What we read of a scheduler (sglang/srt/managers/scheduler.py); nobody waits or runs yet."""
    pool = MHATokenToKVPool(64, 1, torch.float32, 1, 8, 1, "cpu", enable_memory_saver=False)
    allocator = TokenToKVPoolAllocator(64, torch.float32, "cpu", pool, False)
    allocator.available_size = free_tokens
    return SimpleNamespace(
        schedule_policy=policy,
        server_args=SimpleNamespace(
            model_path="",
            quantization=None,
            kv_cache_dtype="auto",
            tp_size=1,
            pp_size=1,
            dp_size=1,
            nnodes=1,
            disaggregation_mode="null",
            enable_dp_attention=False,
            ep_size=1,
            enable_lora=None,
            speculative_algorithm=None,
            speculative_num_draft_tokens=None,
        ),
        model_config=SimpleNamespace(dtype=torch.float32),
        max_total_num_tokens=_KV_POOL_TOKENS,
        max_running_requests=NUM_RUNNING,
        waiting_queue=[],
        running_batch=stand_in_batch([]),
        chunked_req=None,
        max_prefill_tokens=16384,
        chunked_prefill_size=8192,
        page_size=1,
        device="cpu",
        enable_lora=False,
        is_hybrid_swa=False,
        is_mixed_chunk=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        enable_priority_scheduling=False,
        enable_priority_preemption=False,
        prefill_delayer=None,
        truncation_align_size=None,
        new_token_ratio_tracker=SimpleNamespace(current=0.5),
        token_to_kv_pool_allocator=allocator,
        tree_cache=RadixCache.create_simulated(),
        attn_tp_group=SimpleNamespace(broadcast_object=lambda measured: measured, world_size=1),
        get_num_allocatable_reqs=lambda num_running, running_batch: 0,
        _reqs_finishing_inflight=lambda batch: [],
    )


class FullServer:
    """A scheduler whose slots are full of the best by the policy, with others waiting.

    What is free is set aside for those that run. Where one is to yield it cannot, as there is no
    room in host memory: what a move takes is no part of a decision.
    """

    def __init__(
        self, num_waiting: int, num_newcomers: int, policy: str = "sage", hints: Hints = NO_HINTS
    ) -> None:
        generator = np.random.default_rng(num_waiting)
        requests: list[Any] = [
            StandInRequest(generator, hints)
            for _ in range(NUM_RUNNING + num_waiting + num_newcomers)
        ]
        self.batch = stand_in_batch([])
        self._free_tokens = 0
        self.scheduler = stand_in_scheduler(lambda: self._free_tokens, policy)
        self.state = state = SchedulerState(self.scheduler, SageConfig(preemption=_OFF))
        state.preemption = Preemption(self.scheduler, _NO_HOST_MEMORY)
        for request in requests:
            state.jobs.arrived(request)
            request.sage.was_asked_to_yield = True  # it uses nothing that would not survive a swap
        view = state.view(self.batch)
        requests.sort(key=lambda req: place_of(req.sage.job, state.policy, view))
        self.batch.reqs, waiting = requests[:NUM_RUNNING], requests[NUM_RUNNING:]
        self.batch.batch_is_full = True
        self._newcomers = [
            waiting.pop(int(generator.integers(len(waiting)))) for _ in range(num_newcomers)
        ]
        self.scheduler.waiting_queue = waiting
        for request in self.batch.reqs:
            request.output_ids = array("q", [0]) * int(generator.integers(1, 500))
        running = state.jobs.running(self.batch.reqs)
        self._free_tokens = sum(Headroom.of(self.state.view(self.batch)).set_aside_tokens(running))

    def step(self) -> None:
        """A token for all that run; the first in the queue gets a place elsewhere, one arrives."""
        for request in self.batch.reqs:
            request.output_ids.append(0)
        del self.scheduler.waiting_queue[0]
        self.scheduler.waiting_queue.append(self._newcomers.pop())
        self.state.jobs.num_arrivals += 1

    def take_pass(self) -> list[Any]:
        """All that is ours in a pass; the queue after it."""
        run_pass(self.scheduler, lambda batch: SimpleNamespace(running_batch=batch), self.batch)
        queue: list[Any] = self.scheduler.waiting_queue
        return queue
