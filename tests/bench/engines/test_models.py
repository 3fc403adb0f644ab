"""The models of the bench's servers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.engines.clock import light_model
from bench.engines.server.model import END_TOKEN, write_model
from predictor_store.torchvision_schemas import define_missing


def test_the_same_arguments_write_the_same_model_once(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a", num_layers=1, hidden_size=64)
    weights = (first / "model.safetensors").read_bytes()
    second = write_model(tmp_path / "b", num_layers=1, hidden_size=64)
    assert (second / "model.safetensors").read_bytes() == weights
    written_ns = (first / "config.json").stat().st_mtime_ns
    write_model(tmp_path / "a", num_layers=1, hidden_size=64)
    assert (first / "config.json").stat().st_mtime_ns == written_ns
    write_model(tmp_path / "a", num_layers=1, hidden_size=64, seed=1)
    assert (first / "model.safetensors").read_bytes() != weights


@pytest.mark.parametrize("vocab_size", [16384, 40000])
def test_every_token_has_text_and_chats_have_a_template(tmp_path: Path, vocab_size: int) -> None:
    define_missing()
    from transformers import AutoTokenizer

    model = write_model(tmp_path, vocab_size=vocab_size, weights=False)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    assert (len(tokenizer), tokenizer.eos_token) == (vocab_size, END_TOKEN)
    # The benchmark's client counts the first text as the first token.
    assert all(tokenizer.decode([token]).strip() for token in range(0, vocab_size, 97))
    chat = [{"role": "user", "content": "Hello"}]
    assert "Hello" in tokenizer.apply_chat_template(chat, tokenize=False)


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
