"""An SGLang plugin for tests: what some modes need on a CPU, in PyTorch.

SGLang's own kernels for speculative decoding and DP attention are CUDA's, Triton's and those of its
CPU package (sgl_kernel), and its corpus of n-grams is C++ that it compiles anew. Here all drafts
are chains: what followed the same tokens the last time that they were said. Its experts in PyTorch
know of no parallel ones, its adapters pin memory, its short convolutions are Triton's, and its
attention in PyTorch looks for the KV of a sliding window where that of full attention is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import conv1d, scaled_dot_product_attention, silu

from bench.engines.server import plugins

# This number of tokens determines the next draft.
_CONTEXT = 3
NUM_DRAFTED = 4
NGRAM = [
    "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(NUM_DRAFTED),
    "--speculative-ngram-max-bfs-breadth", "1",
]  # fmt: skip


def install(folder: Path) -> dict[str, str]:
    """Make the plugin known to servers with this environment."""
    return plugins.install(folder, __name__) | {"SGLANG_NATIVE_MOVE_KV_CACHE": "1"}


class Corpus:
    """Replaces NgramCorpus (sglang/srt/speculative/cpp_ngram/ngram_corpus.py)."""

    def __init__(self, *, draft_token_num: int, **others: object) -> None:
        self._num_drafted = draft_token_num
        self._next: dict[tuple[int, ...], int] = {}

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        for tokens in batch_tokens:
            for i in range(_CONTEXT, len(tokens)):
                self._next[tuple(tokens[i - _CONTEXT : i])] = tokens[i]

    def batch_get(
        self, req_ids: object, batch_tokens: Sequence[list[int]], total_lens: object
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        drafts: list[int] = []
        for tokens in batch_tokens:
            chain = tokens[-_CONTEXT:]
            for _ in range(self._num_drafted - 1):
                chain.append(self._next.get(tuple(chain[-_CONTEXT:]), 0))
            drafts += chain[-self._num_drafted :]
        mask = np.tri(self._num_drafted, dtype=np.int64).ravel()
        return np.array(drafts, dtype=np.int64), np.tile(mask, len(batch_tokens))

    def synchronize(self) -> None:
        pass

    def reset(self) -> None:
        self._next.clear()

    def erase_match_state(self, req_ids: object) -> None:
        pass


def _reconstruct(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    num_reqs: int,
    num_drafted: int,
) -> None:
    steps = torch.arange(num_drafted)
    positions.copy_((seq_lens[:, None] + steps).flatten())
    index.copy_(torch.arange(num_reqs * num_drafted).view(num_reqs, num_drafted))
    next_token.copy_(torch.where(steps + 1 < num_drafted, steps + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def _verify(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_drafted = candidates.shape[1]
    right = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(dim=1).sum(dim=1)
    for row, num_right in enumerate(right.tolist()):
        kept = slice(row * num_drafted, row * num_drafted + num_right + 1)
        predicts[kept] = target_predict[row, : num_right + 1].int()
        accept_index[row, : num_right + 1] = torch.arange(kept.start, kept.stop)
        accept_token_num[row] = num_right
    return predicts, accept_index, accept_token_num


def _verify_sampled(
    *, candidates: torch.Tensor, target_probs: torch.Tensor, **others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts are what would have been said or they are not, whatever would have been said."""
    said = torch.multinomial(target_probs.flatten(0, 1), 1).view(candidates.shape)
    return _verify(candidates=candidates, target_predict=said, **others)


def _slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **others: object,
) -> torch.Tensor:
    columns = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], columns].flatten().long()


def _write_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    slots: torch.Tensor,
    num_reqs: int,
) -> None:
    windows = zip(start_offset.tolist(), end_offset.tolist(), strict=True)
    begins = 0
    for row, (start, end) in zip(req_pool_indices.tolist(), windows, strict=True):
        req_to_token[row, start:end] = slots[begins : begins + end - start]
        begins += end - start


def _fill_front(number: torch.Tensor, slots: torch.Tensor, front: torch.Tensor) -> None:
    windows = slots.view(len(number), -1)
    found = torch.cat([row[:n] for row, n in zip(windows, number.tolist(), strict=True)])
    front[: len(found)] = found


def _fill_accepted(
    index: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, size: int
) -> None:
    found = slots[index[index >= 0]]
    accepted[: len(found)] = found


def _attend(backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> torch.Tensor:
    """Let each draft attend to all tokens before it, and to the drafts in its mask."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool, num_drafted = backend.token_to_kv_pool, batch.spec_info.draft_token_num
    pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    queries = q.view(-1, num_drafted, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
    found, begins = [], 0
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        num_keys = seq_len + num_drafted
        ends = begins + num_drafted * num_keys
        mask = batch.spec_info.custom_mask[begins:ends].view(num_drafted, num_keys)
        begins = ends
        slots = backend.req_to_token_pool.req_to_token[batch.req_pool_indices[row], :num_keys]
        attended = scaled_dot_product_attention(
            queries[row : row + 1],
            keys[slots].transpose(0, 1)[None],
            values[slots].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            scale=layer.scaling,
        )
        found.append(attended[0].transpose(0, 1).flatten(1))
    return torch.cat(found)


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
    """x: channels by tokens, those of all requests one after the other."""
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
    from sglang.srt.arg_groups import speculative_hook

    # "Overlap schedule is not implemented for speculative decoding on CPU"; it is, with the above.
    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    kernels = ModuleType("sgl_kernel.speculative")
    kernels.reconstruct_indices_from_tree_mask = _reconstruct  # type: ignore[attr-defined]
    names = {"sgl_kernel": ModuleType("sgl_kernel"), kernels.__name__: kernels}
    sys.modules.update(names)
    from sglang.kernels.ops.speculative import reconstruct_tree  # noqa: F401
    from sglang.srt.speculative import ngram_worker

    for name in names:
        del sys.modules[name]
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.mamba import causal_conv1d
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.speculative import eagle_utils, spec_utils

    from patches.platform.cpu import CpuPlatform

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
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
    ngram_worker.NgramCorpus = Corpus
    allocation.assign_req_to_token_pool_func = _write_slots
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda self: None
    eagle_utils.verify_tree_greedy_func = _verify
    eagle_utils.tree_speculative_sampling_target_only = _verify_sampled
    spec_utils.fill_front_out_cache_loc_func = _fill_front
    spec_utils.fill_accept_out_cache_loc_func = _fill_accepted
    CpuPlatform.get_speculative_cache_locs_fn = lambda self: _slots
    TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kw: Any
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            return _attend(self, q, k, v, layer, forward_batch)
        return extend(self, q, k, v, layer, forward_batch, *args, **kw)

    TorchNativeAttnBackend.forward_extend = forward_extend
