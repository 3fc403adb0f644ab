from __future__ import annotations

import inspect
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from patches import compat
from patches.scheduler import survival
from patches.scheduler.preemption import Preemption, preemption_of
from patches.scheduler.survival import (
    why_none_is_preemptible,
    why_not_preemptible,
    why_not_retractable,
)
from sage_sched.app.config import PreemptionConfig
from sage_sched.view import Holding
from tests.patches.schedulers import Server, make_request

# Flags that this release does not have yet.
_LATER = {"prefill_decode_interval_min_bs"} if compat._release() == "0.5.22" else set[str]()


def bare(kind: type[Any], **attributes: Any) -> Any:
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


def scheduler(**other: Any) -> Any:
    """The fields of a scheduler that are read; its pool has no memory."""
    pool = bare(
        other.pop("pool_type", MHATokenToKVPool),
        quant_method=other.pop("quant_method", bare(UnquantizedKVCacheMethod)),
        use_hnd=other.pop("use_hnd", False),
    )
    model = {"is_encoder_decoder": False, "use_ngram_embedding": False}
    return SimpleNamespace(
        token_to_kv_pool_allocator=bare(TokenToKVPoolAllocator, _kvcache=pool),
        req_to_token_pool=bare(other.pop("rows_type", ReqToTokenPool)),
        tree_cache=bare(
            other.pop("tree_type", UnifiedRadixCache),
            tree_components=other.pop("components", (ComponentType.FULL,)),
        ),
        model_config=SimpleNamespace(**model | other.pop("model", {})),
        server_args=ServerArgs(model_path="model", schedule_policy="sage", **other),
    )


def request(sampling: dict[str, Any] | None = None, **parameters: Any) -> Any:
    req = Req("id", "text", array("q", [1, 2]), SamplingParams(**sampling or {}), **parameters)
    req.beam_group = None
    return req


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"max_total_tokens": 2000, "page_size": 16, "tp_size": 2}, None),
        ({"quant_method": object()}, "a quantized KV cache"),
        ({"use_hnd": True}, "SGLANG_USE_HND_KVCACHE"),
        ({"pool_type": MHATokenToKVPoolFP4}, "MHATokenToKVPoolFP4"),
        ({"rows_type": HybridReqToTokenPool}, "HybridReqToTokenPool"),
        ({"tree_type": RadixCache}, "RadixCache"),
        ({"components": (ComponentType.FULL, ComponentType.SWA)}, "more than full attention"),
        ({"model": {"is_encoder_decoder": True}}, "an encoder-decoder model"),
        ({"model": {"use_ngram_embedding": True}}, "n-gram embeddings"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend"),
    ],
)
def test_unknown_servers_preempt_nothing(what: dict[str, Any], reason: str | None) -> None:
    found = why_none_is_preemptible(scheduler(**what))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({}, None),
        ({"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [1]}, None),
        ({"return_hidden_states": True}, None),
        ({"stream": True, "extra_key": "x", "priority": 3, "custom_logit_processor": "c"}, None),
        ({"bootstrap_port": 8998}, None),
        (
            {"sampling": {"json_schema": "{}", "frequency_penalty": 1.0, "stop": "end", "n": 3}},
            None,
        ),
        ({"sampling": {"temperature": 0.5, "sampling_seed": 1, "logit_bias": {"3": 1.0}}}, None),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"input_embeds": [[0.0]]}, "input_embeds"),
        ({"session": object()}, "session"),
        ({"sampling": {"watermark": {"enabled": True}}}, "watermark"),
        ({"sampling": {"beam_width": 4}}, "beam_width"),
    ],
)
def test_a_request_with_anything_else_stays(parameters: dict[str, Any], reason: str | None) -> None:
    assert why_not_preemptible(request(**parameters)) == reason


def test_the_lists_name_what_this_release_has_and_all_else_can_be_looked_up() -> None:
    parameters = set(inspect.signature(Req.__init__).parameters)
    assert parameters >= survival._ALLOWED["request"]
    flags, sampling = (
        {field.name for field in msgspec.structs.fields(kind)}
        for kind in (ServerArgs, SamplingParams)
    )
    assert survival._FLAGS - flags == _LATER
    assert sampling >= survival._ALLOWED["sampling"]
    assert all(hasattr(request(), name) for name in survival._defaults()[0])


@pytest.mark.parametrize(
    ("parameters", "reason", "is_pinned"),
    [
        ({}, None, (False, False)),
        ({"sampling": {"frequency_penalty": 1.0, "min_new_tokens": 3}}, None, (False, False)),
        ({"session": object()}, None, (False, False)),  # it keeps its KV
        ({"return_hidden_states": True}, "return_hidden_states", (False, True)),
        ({"input_embeds": [[0.0]]}, "input_embeds", (True, True)),
        ({"sampling": {"beam_width": 4}}, "beam_width", (True, True)),
    ],
)
def test_memory_is_reserved_for_requests_that_cannot_leave(
    server: Server, parameters: dict[str, Any], reason: str | None, is_pinned: tuple[bool, bool]
) -> None:
    req = request(**parameters)
    assert why_not_retractable(req) == reason
    for enabled, pinned in zip((True, False), is_pinned, strict=True):
        state = server.state
        settings = state.settings.changed({"preemption": {"enabled": enabled}})
        state.preemption = state.last_preemption = Preemption(
            server.scheduler, settings.config.preemption
        )
        assert state.jobs._is_pinned(req) == pinned


def test_a_request_that_stays_is_counted_once(server: Server) -> None:
    preemption = Preemption(server.scheduler, PreemptionConfig())
    plain, stays, whole = reqs = [make_request([9], answer_tokens=3) for _ in range(3)]
    for req in server.arrive(*reqs):
        req.beam_group, req.cached_tokens = None, 8
    stays.session, whole.return_hidden_states = object(), True
    for _ in range(2):
        assert preemption.holding(stays) is None
        assert preemption.holding(plain) == Holding(23, 8, 20, stays_whole=False)
        assert preemption.holding(whole) == Holding(23, 8, 20, stays_whole=True)
    assert preemption.stats()["num_not_preemptible"] == {"session": 1}
    # Under a policy of SGLang's none leaves.
    settings = server.state.settings.changed(
        {"schedule_policy": "fcfs", "preemption": {"enabled": True}}
    )
    assert preemption_of(server.scheduler, settings, preemption) is preemption
    assert not preemption.config.enabled
