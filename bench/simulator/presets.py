"""Defines the engines to simulate. presets.toml has the numbers, each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.simulator.host import NO_HOST, Host
from bench.simulator.radix_tree import HostTier
from sage_sched.app.config import StepTimeConfig
from sage_sched.fields import require
from sage_sched.steps import ServerFacts, StepTime

# The share of a GPU's memory for weights and KV. SGLang picks 0.85 to 0.9 (mem_fraction_static).
_MEMORY_SHARE = 0.88
# The shares of the published bandwidth and arithmetic that kernels reach. These are our
# assumptions, as in StepTimeConfig.
_BANDWIDTH_SHARE = 0.8
_COMPUTE_SHARE = 0.5
WRITE_POLICIES = ("write_through", "write_back")


@dataclass(frozen=True, slots=True)
class Engine:
    """One SGLang engine. Fields with the names of server arguments have their meaning.

    kv_pool_tokens: a multiple of page_size.
    chunked_prefill_size: a multiple of page_size too.
    schedule_conservativeness: scales what SGLang's own admission expects of answers.
    clip_max_new_tokens: the most tokens that admission expects of an answer; SGLang's
        SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.
    reserves: whether SGLang's own admission, which reserves memory for answers, is used under our
        policies too.
    reserved_decode_tokens: --num-reserved-decode-tokens, of an engine that only decodes.
    mixed_chunk: --enable-mixed-chunk.
    swap_token_s: seconds for one token's KV to host memory or back; the device waits meanwhile.
    max_queued_requests: --max-queued-requests; swapped requests do not count. None: no limit.
    host_pool_tokens: KV for which host memory has room.
    hicache_ratio: --hicache-ratio with --enable-hierarchical-cache: the size of host memory for
        evicted KV, in KV pools; 0 without it. hicache_write_policy: write_through or write_back.
    max_loras_per_batch: the most adapters that may run at a time; the model itself counts as one.
    host: the time that the server's host adds; none by default.
    slices: the parts into which policy qllm cuts a best-effort prefill: 1, the model's layers, or
        its layers times its experts. slice_overhead_s: the time of a cut.
    """

    step_time: StepTime
    kv_pool_tokens: int
    max_running_requests: int
    page_size: int = 1
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    schedule_conservativeness: float = 1.0
    clip_max_new_tokens: int = 4096
    reserves: bool = False
    reserved_decode_tokens: int = 512
    mixed_chunk: bool = False
    swap_token_s: float = 0.0
    host_pool_tokens: int = 1 << 60
    hicache_ratio: float = 0.0
    hicache_write_policy: str = "write_through"
    max_loras_per_batch: int = 8
    max_queued_requests: int | None = None
    slices: int = 1
    slice_overhead_s: float = 0.0
    host: Host = NO_HOST

    def __post_init__(self) -> None:
        for name in ("kv_pool_tokens", "chunked_prefill_size"):
            allowed = f"a multiple of page_size, {self.page_size}"
            require(getattr(self, name) % self.page_size == 0, name, getattr(self, name), allowed)
        for name in ("schedule_conservativeness", "hicache_ratio", "slice_overhead_s"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("clip_max_new_tokens", "slices"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        policy, allowed = self.hicache_write_policy, ", ".join(WRITE_POLICIES)
        require(policy in WRITE_POLICIES, "hicache_write_policy", policy, allowed)

    @property
    def host_tier(self) -> HostTier | None:
        """The host tier of its radix tree."""
        if self.hicache_ratio == 0:
            return None
        num_tokens = int(self.hicache_ratio * self.kv_pool_tokens)
        return HostTier(num_tokens, self.hicache_write_policy == "write_back")

    def server_facts(self) -> ServerFacts:
        """Return the facts that a policy may know."""
        return ServerFacts(
            self.kv_pool_tokens,
            self.max_running_requests,
            self.step_time,
            self.swap_token_s,
            mixes_steps=self.mixed_chunk,
            forgets=self.host_tier is None,
        )


def roofline_step_time(
    *,
    weight_bytes: float,
    kv_token_bytes: int,
    bandwidth: float,
    flops: float,
    token_flops: float | None = None,
    pair_flops: float = 0.0,
) -> StepTime:
    """Return the step times of a roofline model.

    Both kinds of step read the weights once. A prefilled token takes 2 operations per parameter (2
    bytes each) unless token_flops gives another number, and an attended pair takes pair_flops. A
    decode step reads the KV.

    bandwidth: in bytes/s, as published.
    flops: in 1/s, as published.
    """
    read_s = weight_bytes / (bandwidth * _BANDWIDTH_SHARE)
    return StepTime(
        prefill_base_s=read_s,
        prefill_request_s=0.0,
        prefill_token_s=(token_flops or weight_bytes) / (flops * _COMPUTE_SHARE),
        prefill_pair_s=pair_flops / (flops * _COMPUTE_SHARE),
        decode_base_s=read_s,
        decode_request_s=0.0,
        decode_kv_token_s=kv_token_bytes / (bandwidth * _BANDWIDTH_SHARE),
    )


def _preset(
    *,
    memory_bytes: float,
    weight_bytes: float,
    kv_token_bytes: int,
    link_bandwidth: float | None = None,
    step_time: Mapping[str, float] | None = None,
    engine: Mapping[str, Any] | None = None,
    host: Mapping[str, Any] | None = None,
    **speeds: float,
) -> Engine:
    """Return the engine of a table of presets.toml.

    speeds: see roofline_step_time. Without them, and without a step_time of its own, the engine has
        StepTimeConfig's default.
    """
    steps = StepTimeConfig().step_time()
    if step_time is not None:
        steps = StepTime(**step_time)
    elif speeds:
        steps = roofline_step_time(
            weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes, **speeds
        )
    pool_tokens = int((memory_bytes * _MEMORY_SHARE - weight_bytes) / kv_token_bytes)
    swap_token_s = kv_token_bytes / link_bandwidth if link_bandwidth else 0.0
    fields = {"max_running_requests": 256, "swap_token_s": swap_token_s, **(engine or {})}
    return Engine(step_time=steps, kv_pool_tokens=pool_tokens, host=Host(**(host or {})), **fields)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_HOST = _TABLES.pop("host")
PRESETS = {name: _preset(**{"host": _HOST, **table}) for name, table in _TABLES.items()}
# For servers whose host is not known.
USUAL_HOST = Host(**_HOST)
H800_QWEN3_32B = PRESETS["h800-qwen3-32b"]
H800_80GB_QWEN3_32B = PRESETS["h800-80gb-qwen3-32b"]
