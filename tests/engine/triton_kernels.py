"""An SGLang plugin for tests: the kernels of hybrid models, which are Triton's, run in Triton's own
interpreter, on a CPU.

Those of gated delta that read through block pointers are in PyTorch here: the Triton that is
installed has none, nor does its interpreter read what they hold of its own functions.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize, rms_norm, silu, softplus

from bench.engines.server import plugins

# Without room to keep states of the past, which its kernels in PyTorch do not tell.
WITHOUT_SNAPSHOTS = ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]


def install(folder: Path) -> dict[str, str]:
    """Make the plugin known to servers with this environment."""
    env = {"TRITON_INTERPRET": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    return plugins.install(folder, __name__) | env


def _gated_delta(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **others: object,
) -> tuple[torch.Tensor, None, None]:
    """One by one by tokens, which are those of all requests one after the other."""
    num_sharing = v.shape[2] // k.shape[2]
    queries = normalize(q[0], dim=-1).repeat_interleave(num_sharing, 1) * q.shape[-1] ** -0.5
    keys = normalize(k[0], dim=-1).repeat_interleave(num_sharing, 1)
    found, bounds = torch.empty_like(v), cu_seqlens.tolist()
    for row, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot]
        for i in range(bounds[row], bounds[row + 1]):
            state *= g[0, i].exp()[:, None, None]
            error = v[0, i] - torch.einsum("hvk,hk->hv", state, keys[i])
            state += torch.einsum("hv,hk->hvk", error * beta[0, i, :, None], keys[i])
            found[0, i] = torch.einsum("hvk,hk->hv", state, queries[i])
    return found, None, None


def _gated_delta_step(
    *,
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    **others: Any,
) -> torch.Tensor:
    kept = -A_log.exp() * softplus(a + dt_bias)
    taken = b.sigmoid()[None]
    return _gated_delta(g=kept[None], beta=taken, initial_state=initial_state_source, **others)[0]


def _norm(norm: Any, x: torch.Tensor, gate: torch.Tensor, *others: object) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:], norm.weight, norm.eps) * silu(gate)


def _masked(original: Any, place: int) -> Any:
    def accessed(*args: Any) -> Any:
        args[place].data = args[place].data.astype(bool)
        return original(*args)

    return accessed


def _interpret() -> None:
    """Add missing features of the interpreter: masks as numbers, and no timing."""
    from triton.runtime import autotuner, interpreter

    builder = interpreter.InterpreterBuilder
    for name, place in (("create_masked_load", 2), ("create_masked_store", 3)):
        setattr(builder, name, _masked(getattr(builder, name), place))
    autotuner.Autotuner._bench = lambda *args, **kw: 0.0
    torch.cpu.device = lambda index: nullcontext()  # type: ignore[attr-defined]


def register() -> None:
    """The entry point."""
    from patches.platform.cpu import CpuPlatform

    CpuPlatform.support_mamba_cache_extra_buffer = lambda self: True
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    _interpret()
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.mamba import causal_conv1d_triton
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.layers.attention.mamba import mamba

    mamba.causal_conv1d_fn = causal_conv1d_triton.causal_conv1d_fn
    mamba.causal_conv1d_update = causal_conv1d_triton.causal_conv1d_update
    gdn_triton.chunk_gated_delta_rule = _gated_delta
    gdn_triton.fused_sigmoid_gating_delta_rule_update = _gated_delta_step
    gdn_triton.TritonGDNKernel.supports_packed_decode = False
    FusedRMSNormGated.forward = _norm
