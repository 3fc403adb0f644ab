"""The attention of servers on a device clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench.engines.clock import light_model

HEADS, KV_HEADS, SIZE = 4, 2, 8


@pytest.mark.parametrize(
    ("num_layers", "config", "reach"),
    [(1, {}, 16), (2, {}, 10_000), (2, {"num_local_experts": 8}, 16)],
)
def test_a_light_model_attends_to_the_newest_tokens(
    num_layers: int, config: dict[str, int], reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(light_model, "lighten", lambda model: None)
    monkeypatch.setattr(light_model, "_attended", SimpleNamespace(num_tokens=16))
    model = SimpleNamespace(
        model=SimpleNamespace(layers=[None] * num_layers), config=SimpleNamespace(**config)
    )
    light_model._after_load(None, SimpleNamespace(model=model))
    torch.manual_seed(0)
    lengths = torch.tensor([3, 40, 17])
    keys, values = torch.randn(2, 200, KV_HEADS, SIZE)
    slots = torch.stack([torch.randperm(200)[:64] for _ in range(3)])
    query, found = torch.randn(3, HEADS, SIZE), torch.zeros(3, HEADS, SIZE)
    light_model.attend(
        None, query, found, keys, values, slots, torch.arange(3), lengths,
        scaling=SIZE**-0.5, enable_gqa=True,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        seen = slots[row, max(0, length - reach) : length]
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            weights = torch.softmax(keys[seen, group] @ query[row, head] * SIZE**-0.5, dim=0)
            assert torch.allclose(found[row, head], weights @ values[seen, group], atol=1e-5)
