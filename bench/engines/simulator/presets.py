"""Engines to simulate, each number with its source."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sage_sched.config import StepTimeConfig
from sage_sched.steps import ServerFacts, StepTime

# Of a GPU's memory, what weights and KV share; SGLang picks 0.85 to 0.9 (mem_fraction_static).
MEMORY_SHARE = 0.88
# Of the published bandwidth and arithmetic, what kernels reach. Ours, as in StepTimeConfig.
BANDWIDTH_SHARE = 0.8
COMPUTE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Engine:
    """One SGLang engine; fields as its server arguments of these names.

    kv_pool_tokens: a multiple of page_size.
    chunked_prefill_size: a multiple of page_size too.
    schedule_conservativeness: scales what SGLang's own admission expects of answers.
    clip_max_new_tokens: the most tokens that admission expects of an answer; SGLang's
        SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.
    mixed_chunk: --enable-mixed-chunk.
    swap_token_s: seconds for one token's KV to host memory or back; the device waits meanwhile.
    host_pool_tokens: KV for which host memory has room.
    slices: in how many parts a prefill of best effort is cut under policy qllm: 1, its layers, or
        its layers times its experts. slice_overhead_s: what a cut takes.
    """

    step_time: StepTime
    kv_pool_tokens: int
    max_running_requests: int
    page_size: int = 1
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    schedule_conservativeness: float = 1.0
    clip_max_new_tokens: int = 4096
    mixed_chunk: bool = False
    swap_token_s: float = 0.0
    host_pool_tokens: int = 1 << 60
    slices: int = 1
    slice_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kv_pool_tokens % self.page_size or self.chunked_prefill_size % self.page_size:
            raise ValueError("kv_pool_tokens and chunked_prefill_size must be multiples of a page")
        if not self.schedule_conservativeness >= 0 or self.clip_max_new_tokens < 1:
            raise ValueError(
                f"schedule_conservativeness is {self.schedule_conservativeness} (allowed: 0 or "
                f"more), clip_max_new_tokens {self.clip_max_new_tokens} (allowed: at least 1)"
            )
        if self.slices < 1 or not self.slice_overhead_s >= 0:
            raise ValueError(
                f"slices is {self.slices} (allowed: at least 1), slice_overhead_s "
                f"{self.slice_overhead_s} (allowed: 0 or more)"
            )

    def shrunk(self, factor: float) -> Engine:
        """An engine for which a token is what so many are for this one: fewer fit, and each takes
        as much longer."""
        if factor == 1:
            return self
        step = self.step_time
        return replace(
            self,
            step_time=replace(
                step,
                prefill_token_s=step.prefill_token_s * factor,
                prefill_pair_s=step.prefill_pair_s * factor**2,
                decode_kv_token_s=step.decode_kv_token_s * factor,
            ),
            kv_pool_tokens=int(self.kv_pool_tokens / factor),
            chunked_prefill_size=int(self.chunked_prefill_size / factor),
            max_prefill_tokens=int(self.max_prefill_tokens / factor),
            swap_token_s=self.swap_token_s * factor,
        )

    def server_facts(self) -> ServerFacts:
        """What a policy may know of it."""
        return ServerFacts(
            self.kv_pool_tokens,
            self.max_running_requests,
            self.step_time,
            self.swap_token_s,
            mixes_steps=self.mixed_chunk,
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
    """Both kinds of step read the weights once; a prefilled token takes 2 operations a parameter
    (2 bytes each) unless token_flops says otherwise, an attended pair pair_flops; a decode step
    reads the KV. bandwidth in bytes/s, flops in 1/s, as published."""
    read_s = weight_bytes / (bandwidth * BANDWIDTH_SHARE)
    return StepTime(
        prefill_base_s=read_s,
        prefill_request_s=0.0,
        prefill_token_s=(token_flops or weight_bytes) / (flops * COMPUTE_SHARE),
        prefill_pair_s=pair_flops / (flops * COMPUTE_SHARE),
        decode_base_s=read_s,
        decode_request_s=0.0,
        decode_kv_token_s=kv_token_bytes / (bandwidth * BANDWIDTH_SHARE),
    )


def _pool_tokens(memory_bytes: float, weight_bytes: float, kv_token_bytes: int) -> int:
    return int((memory_bytes * MEMORY_SHARE - weight_bytes) / kv_token_bytes)


# Qwen3-32B: 32.8 B parameters in bfloat16; 64 layers x 8 KV heads x 128 x 2 (K, V) x 2 bytes
# (its config.json). H800 PCIe: 2.0 TB/s, 756 dense bfloat16 TFLOPS (H100 PCIe's data sheet, whose
# chip it is), PCIe 5 x16 at about 50 of 63 GB/s; 96 GB as in SageSched, section 4.1. The step time
# is StepTimeConfig's default, which is roofline_step_time of these, rounded.
_QWEN3_32B_BYTES, _QWEN3_32B_KV_BYTES = 65.6e9, 64 * 8 * 128 * 2 * 2
H800_QWEN3_32B = Engine(
    step_time=StepTimeConfig().step_time(),
    kv_pool_tokens=_pool_tokens(96e9, _QWEN3_32B_BYTES, _QWEN3_32B_KV_BYTES),
    max_running_requests=256,  # ours: the pool of 72,000 tokens is full long before
    swap_token_s=_QWEN3_32B_KV_BYTES / 50e9,
)
# The same chip with the 80 GB of its data sheet, which the weights nearly fill.
H800_80GB_QWEN3_32B = replace(
    H800_QWEN3_32B, kv_pool_tokens=_pool_tokens(80e9, _QWEN3_32B_BYTES, _QWEN3_32B_KV_BYTES)
)

# Llama-3.1-8B: 8.03 B parameters in bfloat16, 32 layers x 8 KV heads x 128 x 2 x 2 bytes (its
# config.json). A40: 696 GB/s, 149.7 dense bfloat16 TFLOPS, 48 GB (data sheet), PCIe 4 x16 at about
# 25 of 32 GB/s. Chunks as SGLang cuts them on GPUs of 35 to 60 GB (srt/arg_groups/memory_hook.py).
_LLAMA_8B_BYTES, _LLAMA_8B_KV_BYTES = 16.06e9, 32 * 8 * 128 * 2 * 2
A40_LLAMA31_8B = Engine(
    step_time=roofline_step_time(
        weight_bytes=_LLAMA_8B_BYTES,
        kv_token_bytes=_LLAMA_8B_KV_BYTES,
        bandwidth=696e9,
        flops=149.7e12,
    ),
    kv_pool_tokens=_pool_tokens(48e9, _LLAMA_8B_BYTES, _LLAMA_8B_KV_BYTES),
    max_running_requests=256,
    chunked_prefill_size=4096,
    swap_token_s=_LLAMA_8B_KV_BYTES / 25e9,
)

# Llama-3.1-8B on H100 SXM: 3.35 TB/s, 989.4 dense bfloat16 TFLOPS, 80 GB (data sheet), PCIe 5 x16
# at about 50 of 63 GB/s.
H100_LLAMA31_8B = Engine(
    step_time=roofline_step_time(
        weight_bytes=_LLAMA_8B_BYTES,
        kv_token_bytes=_LLAMA_8B_KV_BYTES,
        bandwidth=3.35e12,
        flops=989.4e12,
    ),
    kv_pool_tokens=_pool_tokens(80e9, _LLAMA_8B_BYTES, _LLAMA_8B_KV_BYTES),
    max_running_requests=256,
    swap_token_s=_LLAMA_8B_KV_BYTES / 50e9,
)

# A100 + Qwen1.5-7B: appendix B of Semantic Scheduling for LLM Inference. Its model: a prompt of n
# tokens takes a1 n^2 + a2 n (its section 3.3), so that an attended pair, of which there are n^2/2,
# takes 2 a1; a token decoded after m takes g1 m + g2, read as a step of base g2 and g1 for each KV
# token of the batch; loading and saving take b a token. In seconds a1 = 5.135e-7, a2 = 1.481e-4,
# g1 = 1.349e-8, g2 = 1.330e-2, b = 1e-4. It gives no memory size: 80 GB taken, 7.72 B parameters in
# bfloat16, 32 layers x 32 KV heads x 128 x 2 x 2 bytes (its config.json). Its g1 is a twentieth of
# what reading the KV takes at the data sheet's bandwidth: measured on short prompts, presumably.
A100_QWEN15_7B = Engine(
    step_time=StepTime(
        prefill_base_s=0.0,
        prefill_request_s=0.0,
        prefill_token_s=1.481e-4,
        prefill_pair_s=2 * 5.135e-7,
        decode_base_s=1.330e-2,
        decode_request_s=0.0,
        decode_kv_token_s=1.349e-8,
    ),
    kv_pool_tokens=_pool_tokens(80e9, 15.44e9, 32 * 32 * 128 * 2 * 2),
    max_running_requests=256,
    swap_token_s=1e-4,
)

# Mixtral 8x7B: 46.7 B parameters, of which a token uses 12.9 B (Mixtral of Experts, Jiang et al.
# 2024); 32 layers, 32 heads and 8 KV heads of 128 (its config.json), so that an attended pair takes
# 4 x 32 x 32 x 128 operations. A prefill, and a dozen requests that decode, use all experts, so
# either step is taken to read all weights. In bfloat16 they would not fit one GPU of 80 GB:
# - A100 SXM, 80 GB: 4-bit weights of 22.93 GB, computed in half precision, as in QLLM, section 4;
#   2.039 TB/s, 312 dense bfloat16 TFLOPS (data sheet), PCIe 4 x16 at about 25 of 32 GB/s.
# - H100 SXM, 80 GB: a byte a weight (FP8), 1978.9 dense FP8 TFLOPS, 3.35 TB/s (data sheet), PCIe 5.
_MIXTRAL_KV_BYTES = 32 * 8 * 128 * 2 * 2
_MIXTRAL_TOKEN_FLOPS, _MIXTRAL_PAIR_FLOPS = 2 * 12.9e9, 4 * 32 * 32 * 128
MIXTRAL_LAYERS, MIXTRAL_EXPERTS = 32, 8


def _mixtral(weight_bytes: float, bandwidth: float, flops: float, link: float) -> Engine:
    """link: to host memory, bytes/s."""
    return Engine(
        step_time=roofline_step_time(
            weight_bytes=weight_bytes,
            kv_token_bytes=_MIXTRAL_KV_BYTES,
            bandwidth=bandwidth,
            flops=flops,
            token_flops=_MIXTRAL_TOKEN_FLOPS,
            pair_flops=_MIXTRAL_PAIR_FLOPS,
        ),
        kv_pool_tokens=_pool_tokens(80e9, weight_bytes, _MIXTRAL_KV_BYTES),
        max_running_requests=256,
        swap_token_s=_MIXTRAL_KV_BYTES / link,
    )


A100_MIXTRAL = _mixtral(22.93e9, 2.039e12, 312e12, 25e9)
H100_MIXTRAL = _mixtral(46.7e9, 3.35e12, 1978.9e12, 50e9)

PRESETS = {
    "h800-qwen3-32b": H800_QWEN3_32B,
    "h800-80gb-qwen3-32b": H800_80GB_QWEN3_32B,
    "h100-llama-3.1-8b": H100_LLAMA31_8B,
    "a40-llama-3.1-8b": A40_LLAMA31_8B,
    "a100-qwen1.5-7b": A100_QWEN15_7B,
    "a100-mixtral-8x7b": A100_MIXTRAL,
    "h100-mixtral-8x7b": H100_MIXTRAL,
}
