"""Schedulers and requests without a server or a model, after vLLM's create_scheduler.

Requests, KV pools and radix trees are SGLang's own. A scheduler and its batches have only the
fields that our hooks read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from patches.carrier import encode, encode_hints
from patches.scheduler.hooks import scheduler_hooks
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import NO_HINTS, Hints

MOST_RUNNING = 256


def make_request(
    lengths: Any = (),
    prompt: int | Sequence[int] = 20,
    *,
    answer_tokens: int = 0,
    hints: Hints = NO_HINTS,
    carried: dict[str, Any] | None = None,
    rid: str = "a request",
    **sampling: Any,
) -> Any:
    """Make a request of SGLang. lengths: predicted, none if empty. prompt: its tokens, or their
    number. answer_tokens: tokens that its answer has. carried: other custom_params."""
    predicted = (
        encode(LengthDistribution.from_samples([*lengths], "history")) if len(lengths) else {}
    )
    custom_params = {**predicted, **encode_hints(hints), **(carried or {})}
    params = SamplingParams(**{"max_new_tokens": 1000, "custom_params": custom_params, **sampling})
    ids = array("q", [1] * prompt if isinstance(prompt, int) else prompt)
    req = Req(rid, "", ids, params)
    req.output_ids = array("q", [1] * answer_tokens)
    req.kv.kv_allocated_len = len(ids)
    return req


class StandInBatch:
    """The fields of a running batch that are read (managers/schedule_batch.py, ScheduleBatch)."""

    decoding_reqs = None

    def __init__(self, reqs: Sequence[Any] = (), prefills: bool = False) -> None:
        """prefills: whether it prefills all of their prompts; else it decodes."""
        self.reqs = [*reqs]
        self.batch_is_full = False
        self.forward_mode = SimpleNamespace(is_extend_without_speculative=lambda: prefills)
        self.prefix_lens = [0] * len(self.reqs)
        self.extend_lens = [len(req.origin_input_ids) for req in self.reqs]

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self, *, keep_indices: Sequence[int] | None = None) -> None:
        if keep_indices is not None:
            self.reqs = [self.reqs[index] for index in keep_indices]

    def new_tokens_required_next_decode(self) -> int:
        return len(self.reqs)


class _Queues:
    def __init__(self) -> None:
        self.queue, self.retracted_queue, self.grammar_queue = list[Any](), list[Any](), list[Any]()


# A kind of KV pool, the type of its numbers, and sizes of a token's KV as that kind takes them.
POOLS: dict[str, tuple[Any, ...]] = {
    "float32": (MHATokenToKVPool, torch.float32, 1, 8),
    "bfloat16": (MHATokenToKVPool, torch.bfloat16, 2, 8),
    "of eight bits": (MHATokenToKVPool, torch.float8_e4m3fn, 3, 5),
    "latent": (MLATokenToKVPool, torch.bfloat16, 12, 8),
}


def make_pool(kind: Any, dtype: torch.dtype, *sizes: int) -> Any:
    """Make a KV pool of 64 tokens on the CPU, of two layers (see POOLS)."""
    return kind(64, 1, dtype, *sizes, 2, "cpu", enable_memory_saver=False)


def buffers_of(pool: Any) -> list[torch.Tensor]:
    latent = hasattr(pool, "kv_buffer")
    return [*pool.kv_buffer] if latent else [*pool.k_buffer, *pool.v_buffer]


def make_allocator(pool: Any = None) -> TokenToKVPoolAllocator:
    pool = pool or make_pool(*POOLS["float32"])
    return TokenToKVPoolAllocator(pool.size, pool.dtype, "cpu", pool, False)


def make_tree(pool: Any = None) -> UnifiedRadixCache:
    """Make a radix tree over a KV pool, with rows for eight requests. Set
    SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND to "python" before."""
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(8, 64, "cpu", False),
        token_to_kv_pool_allocator=make_allocator(pool),
        page_size=1,
        tree_components=(ComponentType.FULL,),
    )
    return UnifiedRadixCache(params)


def make_bare_scheduler(
    schedule_policy: str = "sage", free_tokens: int = 10_000, **attributes: Any
) -> Any:
    """Make a scheduler's fields that our hooks read (managers/scheduler.py). Nothing waits or runs
    yet. attributes: of the scheduler, or of its server_args."""
    allocator = make_allocator()
    allocator.available_size = lambda: free_tokens
    server_args = SimpleNamespace(
        model_path="", quantization=None, kv_cache_dtype="auto", tp_size=1, pp_size=1, dp_size=1,
        nnodes=1, disaggregation_mode="null", enable_dp_attention=False, ep_size=1,
        enable_lora=None, speculative_algorithm=None, speculative_num_draft_tokens=None,
        num_reserved_decode_tokens=512, _sage_trace=None,
    )  # fmt: skip
    scheduler = SimpleNamespace(
        schedule_policy=schedule_policy, server_args=server_args,
        model_config=SimpleNamespace(dtype=torch.float32, is_generation=True, model_path=""),
        max_total_num_tokens=500_000, max_running_requests=MOST_RUNNING, page_size=1, device="cpu",
        waiting_queue=[], running_batch=StandInBatch(), chunked_req=None,
        max_prefill_tokens=16384, chunked_prefill_size=8192, is_mixed_chunk=False,
        truncation_align_size=None, enable_lora=False, is_hybrid_swa=False,
        spec_algorithm=SpeculativeAlgorithm.NONE, prefill_delayer=None,
        enable_priority_scheduling=False, enable_priority_preemption=False,
        schedule_low_priority_values_first=False, priority_scheduling_preemption_threshold=10,
        policy=SimpleNamespace(enable_priority_scheduling=False),
        new_token_ratio_tracker=SimpleNamespace(current=0.5),
        token_to_kv_pool_allocator=allocator, tree_cache=RadixCache.create_simulated(),
        attn_tp_group=SimpleNamespace(broadcast_object=lambda measured: measured, world_size=1),
        metrics_collector_context=SimpleNamespace(current_scheduler_metrics_enabled=False),
        grammar_manager=_Queues(), disagg_prefill_bootstrap_queue=_Queues(),
        disagg_prefill_inflight_queue=[], disagg_decode_prealloc_queue=_Queues(),
        disagg_decode_transfer_queue=_Queues(),
        get_num_allocatable_reqs=lambda num_running, running_batch: 0,
        _reqs_finishing_inflight=lambda batch: [],
    )  # fmt: skip
    scheduler._collect_inflight_batches = lambda: [scheduler.running_batch, None]
    for name, value in attributes.items():
        setattr(server_args if hasattr(server_args, name) else scheduler, name, value)
    return scheduler


class Server:
    """A scheduler whose hooks are called as SGLang calls them. state: our part of it."""

    def __init__(self, sections: Any = None, **attributes: Any) -> None:
        """attributes: see make_bare_scheduler. sections: of the configuration."""
        self.scheduler = make_bare_scheduler(**attributes)
        config = {"preemption": {"enabled": False}, **(sections or {})}
        hooks = scheduler_hooks(SageConfig.parse(config))
        self.hooks = {hook.target.rpartition(".")[2]: hook.hook for hook in hooks}
        self.hooks["init_schedule_policy"](None, self.scheduler)
        self.state = self.scheduler.sage

    def arrive(self, *reqs: Any) -> list[Any]:
        """Let requests arrive. They are not in the queue yet."""
        for req in reqs:
            self.hooks["init_req_max_new_tokens"](None, self.scheduler, req)
        return [*reqs]

    def queue(self, *reqs: Any) -> list[Any]:
        self.scheduler.waiting_queue = self.arrive(*reqs)
        return [*reqs]

    def ordered(self, queue: Sequence[Any] | None = None) -> list[Any]:
        """Return the queue in the order of the coming pass."""
        if queue is not None:
            self.scheduler.waiting_queue = [*queue]
        plan = self.state.plan(self.scheduler.running_batch)
        return [self.scheduler.waiting_queue[position] for position in plan.order]

    def stats(self) -> dict[str, Any]:
        result = SimpleNamespace(internal_state={})
        self.hooks["get_internal_state"](result, self.scheduler, object())
        found: dict[str, Any] = result.internal_state["sage"]
        return found
