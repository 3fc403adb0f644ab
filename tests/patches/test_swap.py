from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MHATokenToKVPoolFP4

from patches.swap import why_not


def scheduler(
    pool_type: type[Any] = MHATokenToKVPool, quantized: bool = False, **other: Any
) -> Any:
    """What is read of a scheduler; its pool has no memory."""
    pool = object.__new__(pool_type)
    pool.quant_method = object() if quantized else object.__new__(UnquantizedKVCacheMethod)
    pool.use_hnd = other.pop("use_hnd", False)
    plain = {
        "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: pool),
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "is_hybrid_swa": False,
        "enable_lora": False,
        "require_mlp_sync": False,
        "enable_hisparse": False,
        "dllm_config": None,
    }
    return SimpleNamespace(**plain | other)


def test_a_plain_server_can_swap() -> None:
    assert why_not(scheduler()) is None


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"quantized": True}, "a quantized KV cache"),
        ({"use_hnd": True}, "SGLANG_USE_HND_KVCACHE"),
        ({"pool_type": MHATokenToKVPoolFP4}, "MHATokenToKVPoolFP4"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative decoding"),
    ],
)
def test_where_a_copy_would_not_be_all_of_the_state_none_is_made(
    what: dict[str, Any], reason: str
) -> None:
    assert reason in str(why_not(scheduler(**what)))
