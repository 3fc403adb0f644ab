"""Makes the steps of a small model take little CPU, for servers on a device clock.

The clock gives the time of a step, and the host must only be faster. SGLang's attention in plain
PyTorch goes through a batch request by request, and most of the rest is logits over the whole
vocabulary. Here attention covers only the newest tokens of each request, for all requests at once,
and a decoded token is one of the most frequent words. A Llama of one layer computes only
embeddings, attention and head. A mixture of experts computes everything, with that attention.
In any other model of several layers the hidden states matter, so its attention covers all tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from bench.engines.server.model import NUM_SPECIAL_TOKENS

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
# How many of the newest tokens the attention of this process's model covers; all if its hidden
# states matter.
_attended = SimpleNamespace(num_tokens=16)
_SPOKEN_TOKENS = 512


def register() -> None:
    """Register the hooks in the process of a scheduler."""
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_decode", attend, HookType.REPLACE)
    HookRegistry.register(f"{_BACKEND}._run_sdpa_forward_extend", around_extend, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model", _after_load, HookType.AFTER
    )


def attend(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    **kw: Any,
) -> torch.Tensor:
    """Replace TorchNativeAttnBackend._run_sdpa_forward_decode: attend to the newest tokens of each
    request."""
    num_tokens = min(_attended.num_tokens, int(seq_lens.max()))
    places = seq_lens[:, None] + torch.arange(-num_tokens, 0)
    slots = req_to_token[req_pool_indices[:, None], places.clamp(min=0)]
    found = torch.nn.functional.scaled_dot_product_attention(
        query.unsqueeze(2),
        k_cache[slots].transpose(1, 2),
        v_cache[slots].transpose(1, 2),
        attn_mask=(places >= 0)[:, None, None, :],
        scale=scaling,
        enable_gqa=enable_gqa,
    )
    output.copy_(found.squeeze(2))
    return output


def around_extend(
    original: Callable[..., torch.Tensor], self: Any, *given: Any, **kw: Any
) -> torch.Tensor:
    """Replace TorchNativeAttnBackend._run_sdpa_forward_extend in a light model; call the original
    in others.

    The original computes the attention of each request anew from its first token on, also of
    requests that decode in a mixed step: a tenth of a second at 60 requests of 1,000 tokens.
    """
    if _attended.num_tokens == sys.maxsize:
        return original(self, *given, **kw)
    query, output, k_cache, v_cache, req_to_token, req_pool_indices, _, prefix_lens, new_lens = (
        given[:9]
    )
    # Treat each token as a request that ends with it.
    before = prefix_lens - new_lens.cumsum(0) + new_lens
    lens = before.repeat_interleave(new_lens) + torch.arange(1, len(query) + 1)
    pools = req_pool_indices.repeat_interleave(new_lens)
    return attend(
        self, query, output, k_cache, v_cache, req_to_token, pools, lens, *given[9:], **kw
    )


def _after_load(result: None, self: Any, *args: Any, **kw: Any) -> None:
    if len(self.model.model.layers) == 1:
        lighten(self.model)
    elif not hasattr(self.model.config, "num_local_experts"):
        _attended.num_tokens = sys.maxsize


def lighten(model: Any) -> None:
    """Make a LlamaForCausalLM of one layer light (sglang/srt/models/llama.py)."""
    head = model.lm_head.weight.data[:_SPOKEN_TOKENS].clone()
    head[:NUM_SPECIAL_TOKENS] = 0.0  # never the largest logit: they have no text
    model.lm_head.weight.data = head
    (layer,) = model.model.layers
    attention = layer.self_attn
    embeddings = model.model.embed_tokens.weight
    to_qkv = attention.qkv_proj.weight.data.T.contiguous()
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        qkv = torch.nn.functional.embedding(input_ids, embeddings) @ to_qkv
        return attention.attn(*qkv.split(sizes, dim=-1), batch)

    model.model.forward = forward
