"""Moves KV to host memory and back, checks every bit, and measures the speed.

It uses SGLang's own pools, allocators and copies, as a preempted request does, without a server.
For comparison it moves the same bytes in one piece, from pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch.utils.benchmark import Timer

_ROUNDS = 5


def measure(
    device: str, *, num_layers: int, num_heads: int, head_dim: int, num_tokens: int
) -> dict[str, Any]:
    """Move KV of this shape in bfloat16 out and back.

    Return whether it came back `bit_exact`, and gigabytes per second `out` and `back`, also for the
    bus alone (`bus_out`, `bus_back`); the best of 5 rounds.
    """
    pool = MHATokenToKVPool(
        size=4 * num_tokens, page_size=1, dtype=torch.bfloat16, head_num=num_heads,
        head_dim=head_dim, layer_num=num_layers, device=device, enable_memory_saver=False,
    )  # fmt: skip
    allocator = TokenToKVPoolAllocator(4 * num_tokens, torch.bfloat16, device, pool, False)
    generator = torch.Generator(device=device).manual_seed(0)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        bits = torch.randint(
            -(2**15), 2**15, buffer.shape, dtype=torch.int16, device=device, generator=generator
        )
        buffer.copy_(bits.view(torch.bfloat16))
    # Scattered, like the slots of a request in a busy batch. The KV returns to other slots.
    order = torch.randperm(4 * num_tokens, generator=generator, device=device) + 1
    left, taken = order[:num_tokens], order[num_tokens : 2 * num_tokens]
    wanted = _bits(pool, left)
    copy = allocator.get_cpu_copy(left)
    allocator.load_cpu_copy(copy, taken)
    exact = bool(torch.equal(_bits(pool, taken), wanted))
    num_bytes = wanted.numel() * wanted.element_size()
    speeds = {
        "out": _best_s(lambda: allocator.get_cpu_copy(left)),
        "back": _best_s(lambda: allocator.load_cpu_copy(copy, taken)),
    }
    here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    speeds |= {
        "bus_out": _best_s(lambda: there.copy_(here)),
        "bus_back": _best_s(lambda: here.copy_(there)),
    }
    return {
        "bit_exact": exact,
        "token_us": 1e6 * (speeds["out"] + speeds["back"]) / (2 * num_tokens),
        **{f"{name}_gb_per_s": num_bytes / 1e9 / seconds for name, seconds in speeds.items()},
    }


def _bits(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    """Return the KV as integers, shape (2 * layers, slots, heads, dimension), so that NaN equals
    itself."""
    buffers = (*pool.k_buffer, *pool.v_buffer)
    return torch.stack([buffer[slots].view(torch.int16) for buffer in buffers])


def _best_s(move: Callable[[], Any]) -> float:
    timer = Timer("move()", globals={"move": move})  # it waits for the GPU
    return min(float(timer.timeit(1).mean) for _ in range(_ROUNDS))
