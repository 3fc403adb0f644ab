"""The parts of SGLang's scheduler objects that we read (SGLang 0.5.23).

`sage` is our state on such an object. It has no type, because this module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class SamplingParams(Protocol):
    """A request's sampling parameters (sampling/sampling_params.py)."""

    max_new_tokens: int
    ignore_eos: bool
    custom_params: Mapping[str, Any] | None
    min_new_tokens: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float


class RequestKv(Protocol):
    """The KV that a request holds (Req.kv)."""

    kv_allocated_len: int
    kv_committed_len: int
    cache_protected_len: int
    req_pool_idx: int
    retraction_backup: object | None


class Req(Protocol):
    """A request in a scheduler (managers/schedule_batch.py)."""

    sage: Any  # patches.scheduler.jobs.RequestState
    sage_token: tuple[int, int, Any]  # patches.scheduler.gap_meter
    rid: str
    origin_input_ids: list[int]
    input_embeds: object | None
    extra_key: str | None
    cache_salt: str | None
    output_ids: list[int]
    full_untruncated_fill_ids: list[int]
    sampling_params: SamplingParams
    kv: RequestKv
    session: object | None
    cached_tokens: int
    num_matched_prefix_tokens: int
    last_node: Any
    host_hit_length: int
    retraction_count: int
    send_token_offset: int
    prefix_len: int
    extend_end: int
    grammar: object | None
    beam_group: object | None
    priority: int | None
    lora_id: str | None
    time_stats: Any
    to_finish: Any
    finished_reason: object | None
    lock: Any

    @property
    def seqlen(self) -> int: ...
    def finished(self) -> bool: ...
    def next_output_finishes_by_length(self) -> bool: ...
    def reset_for_retract(self) -> None: ...


class Batch(Protocol):
    """A batch, SGLang's ScheduleBatch (managers/schedule_batch.py)."""

    reqs: list[Req]
    batch_is_full: bool
    prefix_lens: Sequence[int]
    extend_lens: Sequence[int]
    forward_mode: Any
    decoding_reqs: Sequence[Req] | None

    def is_empty(self) -> bool: ...
    def check_decode_mem(self) -> bool: ...
    def new_tokens_required_next_decode(self) -> int: ...
    def merge_batch(self, other: Batch) -> None: ...
    def release_req(self, index: int, num_remaining: int, *, offload_kv: bool) -> None: ...
    def _get_decode_retraction_order(self, reqs: list[Req]) -> list[int]: ...
    def filter_batch(self, *, keep_indices: list[int] | None = None) -> None: ...


class Allocator(Protocol):
    """The allocator of the KV pool (mem_cache/allocator)."""

    size: int

    def available_size(self) -> int: ...
    def get_kvcache(self) -> Any: ...
    def get_cpu_copy(self, indices: Any) -> Any: ...
    def load_cpu_copy(self, kv_cache: Any, indices: Any) -> None: ...


class Tree(Protocol):
    """The radix tree (mem_cache/unified_radix_cache.py)."""

    tree_components: tuple[Any, ...]
    disable: bool
    cache_controller: Any
    tree_core: Any

    def evictable_size(self) -> int: ...
    def lock(self, node: Any) -> Any: ...
    def prefix_device_indices(self, req: Req) -> Any: ...
    def unlock(self, lock: Any) -> None: ...


class Scheduler(Protocol):
    """The scheduler of one rank (managers/scheduler.py)."""

    sage: Any  # patches.scheduler.state.SchedulerState
    waiting_queue: list[Req]
    max_queued_requests: int | None
    running_batch: Batch
    chunked_req: Req | None
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    page_size: int
    enable_overlap: bool
    is_hybrid_swa: bool
    is_mixed_chunk: bool
    prefill_delayer: object | None
    truncation_align_size: int | None
    device: str
    schedule_policy: str
    server_args: Any
    model_config: Any
    attn_tp_group: Any
    enable_lora: bool
    enable_lora_overlap_loading: bool
    lora_drainer: object | None
    tp_worker: Any
    token_to_kv_pool_allocator: Allocator
    tree_cache: Tree
    req_to_token_pool: Any
    new_token_ratio_tracker: Any
    spec_algorithm: Any
    enable_priority_scheduling: bool
    enable_priority_preemption: bool
    schedule_low_priority_values_first: bool
    priority_scheduling_preemption_threshold: int
    future_map: Any
    forward_stream: Any
    _request_dispatcher: Any
    metrics_collector_context: Any
    grammar_manager: Any
    policy: Any
    _sched_idled: bool
    disagg_prefill_bootstrap_queue: Any
    disagg_prefill_inflight_queue: Any
    disagg_decode_prealloc_queue: Any
    disagg_decode_transfer_queue: Any

    def can_schedule_lora_req(self, req: Req, beside: set[str | None]) -> bool: ...
    def abort_request(self, recv_req: Any) -> None: ...
    def _release_aborted_request(self, req: Req) -> None: ...
    def send_abort_output(self, abort_req: Any, req: Req) -> None: ...
    def is_fully_idle(self, *, ignore_waiting: bool) -> bool: ...
    def _collect_inflight_batches(self) -> Sequence[Batch | None]: ...
    def _reqs_finishing_inflight(self, batch: Batch) -> Sequence[Req]: ...
    def get_num_allocatable_reqs(self, running_bs: int, *, running_batch: Batch) -> int: ...
