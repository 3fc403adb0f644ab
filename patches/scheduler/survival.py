"""Decides which requests can be preempted or retracted, by a list of features known to survive it.

A swapped-out request loses its row and its KV slots, and gets others. Everything else that SGLang
keeps by row, by slot or by step would be lost or mixed up. So a request is preemptible only if
survival.toml names everything that it and its server use. Features of later releases are not in the
list.

SGLang itself retracts a request when memory runs out, and computes its KV again later. That would
change the answers of requests with features that are not in the list, and of a few others.
"""

from __future__ import annotations

import inspect
import tomllib
from functools import cache
from pathlib import Path
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

# Allowed names by owner. The file groups them by the reason why they are allowed.
_ALLOWED = {
    of: {name for names in groups.values() for name in names}
    for of, groups in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
_SECTIONS = (serving.Serving, observability.Observability, exec_.ExecGraph, exec_.ExecComm)
_OF_SECTIONS = {field.name for section in _SECTIONS for field in msgspec.structs.fields(section)}
_FLAGS = _ALLOWED["flags"] | (_OF_SECTIONS - _ALLOWED["not_of_sections"])


def why_none_is_preemptible(scheduler: Scheduler) -> str | None:
    """Return the feature that rules preemption out on this server, or None."""
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
        # These models keep more state of a request than its KV.
        "an encoder-decoder model": model.is_encoder_decoder,
        "n-gram embeddings": model.use_ngram_embedding,
        "--disaggregation-decode-retraction-backup none": (
            scheduler.server_args.disaggregation_decode_retraction_backup == "none"
        ),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    flags = sorted(_set_flags(scheduler.server_args) - _FLAGS)
    return f"--{flags[0].replace('_', '-')}, which is untried with preemption" if flags else None


def why_not_preemptible(req: Req) -> str | None:
    """Return a feature of a request that is not known to survive a swap, or None."""
    if req.beam_group is not None:
        return "beam search"
    for owner, defaults in zip((req, req.sampling_params), _defaults(), strict=True):
        for name, unused in defaults.items():
            value = getattr(owner, name)
            # Trap: types are compared first, because a tensor has no truth value.
            if value is not unused and (type(value) is not type(unused) or value != unused):
                return name
    return None


def why_not_retractable(req: Req) -> str | None:
    """Return a feature of a request with which its answer might change if it were retracted, or
    None. With input embeddings, for example, SGLang begins the answer again, although the client
    has had a part of it (Req.reset_for_retract)."""
    reason = why_not_preemptible(req)
    if reason == "session":  # a session keeps its KV
        reason = None
    return lost_by_retraction(req) or reason


def lost_by_retraction(req: Req) -> str | None:
    """Return a feature of a request that survives a swap but not a retraction, or None."""
    return next((name for name in _ALLOWED["lost_by_retraction"] if getattr(req, name)), None)


def _set_flags(server_args: Any) -> set[str]:
    """Return the names of flags that differ from their defaults. SGLang keeps this record as the
    operator wrote it, and resolves defaults elsewhere (server_args.py, resolve_once)."""
    unset = type(server_args)(model_path="")
    names = (field.name for field in msgspec.structs.fields(type(server_args)))
    return {name for name in names if getattr(server_args, name) != getattr(unset, name)}


@cache
def _defaults() -> tuple[dict[str, object], dict[str, object]]:
    """Return the parameters of a request, and of its SamplingParams, that are not on the lists,
    each with the value that means it is unused."""
    parameters = inspect.signature(schedule_batch.Req.__init__).parameters
    fields = msgspec.structs.fields(SamplingParams)
    of_request, of_sampling = {"self", *_ALLOWED["request"]}, _ALLOWED["sampling"]
    return (
        {name: p.default for name, p in parameters.items() if name not in of_request},
        {field.name: field.default for field in fields if field.name not in of_sampling},
    )
