"""Which requests may yield: an allow-list of what is known to survive a swap.

A swapped request loses its row and its KV slots, and gets others. Whatever else SGLang keeps by
row, by slot or by step would be lost or mixed up. So a request yields only if everything that it
and its server use is named here. All other requests stay, and so do those that use something that a
later release adds.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import msgspec
from sglang.srt.arg_groups.fields import exec_, observability, serving
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from patches.engine_types import Req, Scheduler


def _names(*structs: type[msgspec.Struct]) -> set[str]:
    return {field.name for struct in structs for field in msgspec.structs.fields(struct)}


# Flags that an operator may have set. Those in tests/engine were tried. Each of the others either
# chooses kernels or their launch, which keep nothing about a request, or concerns logs or the
# processes around the scheduler.
_FLAGS = (
    _names(serving.Serving, observability.Observability, exec_.ExecGraph, exec_.ExecComm)
    # These shorten an answer's KV, or look into it.
    - {"strip_thinking_cache", "enable_strict_thinking"}
    - {"kv_events_config", "kv_canary", "kv_canary_real_data", "kv_canary_sweep_interval"}
    - {"forward_hooks", "msprobe_dump_config", "debug_tensor_dump_input_file"}
) | {
    # The host and its processes.
    "device", "base_gpu_id", "gpu_id_step", "random_seed", "watchdog_timeout",
    "soft_watchdog_timeout", "sleep_on_idle", "numa_node", "gc_threshold", "nccl_port",
    "dist_timeout", "dist_init_addr", "enable_p2p_check", "tp_size", "dp_size", "ep_size",
    "load_balance_method", "enable_dp_attention",
    # The model's weights.
    "model_path", "load_format", "model_loader_extra_config", "trust_remote_code",
    "context_length", "revision", "json_model_override_args", "dtype", "quantization",
    "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints", "download_dir",
    # Adapters, which do not change while a request that uses one is unfinished.
    "enable_lora", "lora_paths", "lora_backend", "lora_target_modules", "lora_eviction_policy",
    "max_lora_rank", "max_loras_per_batch", "max_loaded_loras",
    # Memory and scheduling.
    "mem_fraction_static", "max_running_requests", "max_queued_requests", "max_total_tokens",
    "chunked_prefill_size", "max_prefill_tokens", "prefill_max_requests", "schedule_policy",
    "enable_priority_scheduling", "disable_priority_preemption", "default_priority_value",
    "schedule_low_priority_values_first", "priority_scheduling_preemption_threshold",
    "abort_on_priority_when_disabled", "retraction_policy",
    "schedule_conservativeness", "page_size", "disable_overlap_schedule", "enable_mixed_chunk",
    "radix_eviction_policy", "_radix_eviction_policy_explicitly_set",
    "radix_eviction_policy_config", "disable_radix_cache", "kv_cache_dtype",
    "prefill_decode_interval", "prefill_decode_interval_min_bs",
    # The hierarchical cache, without storage behind it.
    "enable_hierarchical_cache", "hicache_ratio", "hicache_size", "hicache_host_memory_fraction",
    "hicache_write_policy", "hicache_io_backend", "hicache_mem_layout",
    # Whence the KV of prompts comes, and how many may wait with it.
    "disaggregation_mode", "disaggregation_transfer_backend", "disaggregation_ib_device",
    "disaggregation_decode_retraction_backup", "disaggregation_decode_extra_slots",
    "num_reserved_decode_tokens",
    # Kernels.
    "attention_backend", "decode_attention_backend", "prefill_attention_backend",
    "sampling_backend", "fp8_gemm_runner_backend", "fp4_gemm_runner_backend",
    "bf16_gemm_backend", "disable_flashinfer_autotune", "triton_attention_num_kv_splits",
    "triton_attention_reduce_in_fp32", "flashinfer_mla_disable_ragged", "moe_runner_backend",
    # What a request may ask for; _REQUEST says whether it then may yield.
    "grammar_backend", "disable_outlines_disk_cache", "enable_custom_logit_processor",
    "enable_return_hidden_states", "enable_return_routed_experts",
}  # fmt: skip

# Parameters of Req that may have any value.
_REQUEST = {
    # Who asks, for what, and how the answer goes back: none of this is on the device.
    "rid", "origin_input_text", "origin_input_ids", "origin_input_ids_unpadded",
    "sampling_params", "stream", "eos_token_ids", "vocab_size", "metrics_collector",
    "time_stats", "http_worker_ipc", "routing_key", "routed_dp_rank", "priority",
    # Parts of the radix tree's key. A swapped request is inserted again under the same key.
    "extra_key", "cache_salt", "session_id",
    # Of the batch's adapters, which a return has to fit in (patches/scheduler/kv_copy.py).
    "lora_id",
    # Lists on the request, which grow with each token.
    "return_logprob", "top_logprobs_num", "token_ids_logprob", "return_hidden_states",
    # Computed from the row's own logits in each step.
    "custom_logit_processor",
    # Counted on the request, token by token.
    "require_reasoning",
    # It matters only to requests that ask for experts, which stay.
    "routed_experts_start_len",
    # Where its prompt is prefilled, if that is not here.
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank",
    # The same for all requests of a server, and checked there.
    "disagg_mode", "dllm_config",
}  # fmt: skip

# Parameters of SamplingParams that may have any value.
_SAMPLING = {
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "stop_strs", "stop_regex_strs",
    "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval",
    # Applied to each step's logits anew, the seed by position.
    "temperature", "top_p", "top_k", "min_p", "logit_bias", "sampling_seed", "custom_params",
    # Counted in the batch, and counted again on return (patches/scheduler/kv_copy.py).
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens",
    # Each sample is a request of its own.
    "n",
    # The grammar's state stays on the request (patches/scheduler/kv_copy.py).
    "json_schema", "regex", "ebnf", "structural_tag", "ebnf_full_assistant",
}  # fmt: skip


def why_none_yields(scheduler: Scheduler) -> str | None:
    """What keeps all requests of this server from yielding; None if nothing does."""
    allocator = scheduler.token_to_kv_pool_allocator
    pool, tree = allocator.get_kvcache(), scheduler.tree_cache
    model = scheduler.model_config
    kinds = (
        (pool, (MHATokenToKVPool, MLATokenToKVPool)),
        (allocator, (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)),
        (scheduler.req_to_token_pool, (ReqToTokenPool, DecodeReqToTokenPool)),
        (tree, (UnifiedRadixCache,)),
    )
    for found, known in kinds:
        if type(found) not in known:
            return f"memory of type {type(found).__name__}"
    reasons = {
        "a radix tree of more than full attention": tree.tree_components != (ComponentType.FULL,),
        # SGLang's copy omits the scales.
        "a quantized KV cache": getattr(pool, "is_quantized_kv_cache", False),
        "SGLANG_USE_HND_KVCACHE": getattr(pool, "use_hnd", False),
        # These keep more about a request than its KV.
        "an encoder-decoder model": model.is_encoder_decoder,
        "n-gram embeddings": model.use_ngram_embedding,
        "a multimodal model": model.is_multimodal,
        "--disaggregation-decode-retraction-backup none": (
            scheduler.server_args.disaggregation_decode_retraction_backup == "none"
        ),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    flags = sorted(_set_flags(scheduler.server_args) - _FLAGS)
    return f"--{flags[0].replace('_', '-')}, which has not been tried with it" if flags else None


def why_it_stays(req: Req) -> str | None:
    """What a request uses that is not known to survive a swap; None if nothing."""
    if req.beam_group is not None:
        return "beam search"
    if req.multimodal_inputs is not None:
        return "multimodal input"
    for owner, defaults in zip((req, req.sampling_params), _defaults(), strict=True):
        for name, unused in defaults.items():
            value = getattr(owner, name)
            # Types are compared first, as a tensor has no truth value.
            if value is not unused and (type(value) is not type(unused) or value != unused):
                return name
    return None


def _set_flags(server_args: Any) -> set[str]:
    """The fields that differ from their defaults. SGLang keeps this record as the operator wrote
    it, and resolves defaults elsewhere (server_args.py, resolve_once)."""
    unset = type(server_args)(model_path="")
    names = (field.name for field in msgspec.structs.fields(type(server_args)))
    return {name for name in names if getattr(server_args, name) != getattr(unset, name)}


@cache
def _defaults() -> tuple[dict[str, object], dict[str, object]]:
    """The parameters of a request, and of its SamplingParams, that are not on the lists; each with
    the value that it has when it is not used."""
    parameters = inspect.signature(schedule_batch.Req.__init__).parameters
    fields = msgspec.structs.fields(SamplingParams)
    return (
        {name: p.default for name, p in parameters.items() if name not in {"self", *_REQUEST}},
        {field.name: field.default for field in fields if field.name not in _SAMPLING},
    )
