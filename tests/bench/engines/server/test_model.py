from __future__ import annotations

from pathlib import Path

import pytest

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
    # The benchmark's client takes the first text for the first token.
    assert all(tokenizer.decode([token]).strip() for token in range(0, vocab_size, 97))
    chat = [{"role": "user", "content": "Hello"}]
    assert "Hello" in tokenizer.apply_chat_template(chat, tokenize=False)
