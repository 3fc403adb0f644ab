"""Moves KV to host memory and back, checks every bit, and measures the speed.

It uses SGLang's own pool and our arena, as a preempted request does, without a server. For
comparison it moves the same bytes in one piece, from pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch.utils.benchmark import Timer

from patches.scheduler.kv_arena import KvArena
from patches.scheduler.swap_meter import Span

_ROUNDS = 5
# Work on the device during a move. It takes about ten times the move's time.
_WORK_SIZE, _WORK_ROUNDS = 8192, 40


def measure(
    device: str, *, num_layers: int, num_heads: int, head_dim: int, num_tokens: int
) -> dict[str, Any]:
    """Move KV of this shape in bfloat16 out and back.

    Return whether the KV came back unchanged (`bit_exact`), and the gigabytes per second of moves
    (`out`, `back`) and of the bus alone (`bus_out`, `bus_back`), the best of 5 rounds. `held_up_us`
    is the time for which a token's move delays the device. `exposed` is the time that a move out
    adds to the device's other work, in units of the move's time. A GPU raises an error if the host
    waits for it during a move.
    """
    pool = MHATokenToKVPool(
        size=4 * num_tokens, page_size=1, dtype=torch.bfloat16, head_num=num_heads,
        head_dim=head_dim, layer_num=num_layers, device=device, enable_memory_saver=False,
    )  # fmt: skip
    arena = KvArena([*pool.k_buffer, *pool.v_buffer], 2 * num_tokens)
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
    with _waiting_forbidden(device):
        spans = [Span(device)]
        copy: Any = arena.copy_out(left)
        spans[0].end()
        arena.fetch(copy)
        spans.append(Span(device))
        arena.put_back(copy, taken, 0)
        spans[1].end()
    exact = bool(torch.equal(_bits(pool, taken), wanted))
    held_up_s = sum(span.seconds() or 0.0 for span in spans)
    num_bytes = wanted.numel() * wanted.element_size()
    # Host memory has room for two copies at a time.
    out_s = _best_s(lambda: arena.free(_copied(arena, left)))
    both_s = _best_s(lambda: arena.put_back(_copied(arena, left), taken, 0))
    work = torch.randn(_WORK_SIZE if device == "cuda" else 64, 64, device=device)

    def works() -> None:
        for _ in range(_WORK_ROUNDS):
            torch.mm(work, work.T)

    def works_beside() -> None:
        arena.free(_copied(arena, left))
        works()

    here = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    speeds = {
        "out": out_s,
        "back": max(both_s - out_s, 1e-9),
        "bus_out": _best_s(lambda: there.copy_(here)),
        "bus_back": _best_s(lambda: here.copy_(there)),
    }
    return {
        "bit_exact": exact,
        "token_us": 1e6 * both_s / (2 * num_tokens),
        "held_up_us": 1e6 * held_up_s / (2 * num_tokens),
        "exposed": (_best_s(works_beside) - _best_s(works)) / out_s,
        **{f"{name}_gb_per_s": num_bytes / 1e9 / seconds for name, seconds in speeds.items()},
    }


@contextmanager
def _waiting_forbidden(device: str) -> Iterator[None]:
    """Let PyTorch raise an error if the host waits for a GPU in this context."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _copied(arena: KvArena, slots: torch.Tensor) -> Any:
    copy = arena.copy_out(slots)
    assert copy is not None
    return copy


def _bits(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    """Return the KV as integers, shape (2 * layers, slots, heads, dimension), so that NaN equals
    itself."""
    buffers = (*pool.k_buffer, *pool.v_buffer)
    return torch.stack([buffer[slots].view(torch.int16) for buffer in buffers])


def _best_s(move: Callable[[], Any]) -> float:
    timer = Timer("move()", globals={"move": move})  # it waits for the GPU
    return min(float(timer.timeit(1).mean) for _ in range(_ROUNDS))
