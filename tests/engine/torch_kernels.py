"""An SGLang plugin for tests: replaces kernels that some modes need, in PyTorch on a CPU.

SGLang's own kernels for DP attention and short convolutions need CUDA and Triton. Its experts in
PyTorch do not support expert parallelism, its adapters pin memory, and its attention in PyTorch
looks for a sliding window's KV in the wrong pool, that of full attention.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import conv1d, silu

from bench.engines.server import plugins


def install(folder: Path) -> dict[str, str]:
    """Make the plugin known to servers with this environment."""
    return plugins.install(folder, __name__)


def _experts_of_a_rank(layer: Any, x: torch.Tensor, topk: Any, config: object) -> torch.Tensor:
    found = torch.zeros_like(x)
    for expert, (up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        share = (topk.topk_weights * (topk.topk_ids == expert)).sum(1, keepdim=True).to(x.dtype)
        gate, value = (x @ up.T).chunk(2, dim=-1)
        found += share * ((silu(gate) * value) @ down.T)
    return found


def _reduce_scatter(group: Any, output: torch.Tensor, given: torch.Tensor) -> None:
    torch.distributed.all_reduce(given, group=group.device_group)
    output.copy_(given.chunk(group.world_size)[group.rank_in_group])


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **others: object,
) -> torch.Tensor:
    """x: channels by tokens, with the tokens of all requests one after the other."""
    found, bounds = torch.empty_like(x), query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        here = slice(bounds[row], bounds[row + 1])
        before = conv_states[slot] * has_initial_state[row]
        seen = torch.cat([before, x[:, here]], dim=1)
        found[:, here] = conv1d(seen[None], weight[:, None], bias, groups=len(x))[0]
        conv_states[slot] = seen[:, -before.shape[1] :]
    return found


def _convolve_step(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    conv_state_indices: torch.Tensor,
    **others: object,
) -> torch.Tensor:
    return _convolve(
        x.T,
        weight,
        bias,
        conv_states=conv_state,
        query_start_loc=torch.arange(len(x) + 1),
        cache_indices=conv_state_indices,
        has_initial_state=torch.ones(len(x)),
    ).T


def _by_slots_of_the_full_pool(original: Any) -> Any:
    def buffer(pool: Any, layer_id: int) -> torch.Tensor:
        found: torch.Tensor = original(pool, layer_id)
        _, is_of_windows = pool.layers_mapping[layer_id]
        return found[pool.full_to_swa_index_mapping] if is_of_windows else found

    return buffer


def _unpinned(original: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **kw: Any) -> Any:
        return original(*args, **kw)

    return made


def register() -> None:
    """The entry point."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.mamba import causal_conv1d
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    GroupCoordinator.reduce_scatter_tensor = _reduce_scatter
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign]
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    fused_moe_native.moe_forward_native = _experts_of_a_rank
    causal_conv1d._causal_conv1d_fn_triton = _convolve
    causal_conv1d._causal_conv1d_update_triton = _convolve_step
    for name in ("get_key_buffer", "get_value_buffer"):
        setattr(SWAKVPool, name, _by_slots_of_the_full_pool(getattr(SWAKVPool, name)))
