"""The decoder without a server against transformers, on a small model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.real_model.decoder import Chat, Decoder
from predictor_store.torchvision_schemas import define_missing

PROMPTS = [(1, 5, 9, 33, 7), (2, 2, 60), tuple(range(10, 40)), (8,), (4, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    define_missing()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=80, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, eos_token_id=0, bos_token_id=1,
        tie_word_embeddings=True, initializer_range=0.2, max_position_embeddings=128,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return folder, made


@torch.inference_mode()
def test_its_logits_are_those_of_transformers(model: tuple[Path, torch.nn.Module]) -> None:
    folder, reference = model
    decoder = Decoder(folder, num_slots=2, max_tokens=64)
    for prompt in PROMPTS:
        expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(decoder.logits([*prompt]), expected, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_slots_that_chats_share_do_not_mix_them(model: tuple[Path, torch.nn.Module]) -> None:
    folder, reference = model
    chats = [Chat(prompt, 0, 0.0, 12 + i) for i, prompt in enumerate(PROMPTS)]
    answers = list(Decoder(folder, num_slots=2, max_tokens=64).answer(chats))
    assert sorted(each.number for each in answers) == [*range(len(chats))]
    for each in answers:
        said = reference.generate(
            torch.tensor([each.chat.input_ids]),
            max_new_tokens=each.chat.max_new_tokens,
            do_sample=False,
        )
        assert each.output_ids == said[0, len(each.chat.input_ids) :].tolist()


def test_a_seed_tells_the_answer(model: tuple[Path, torch.nn.Module]) -> None:
    def said(seed: int, slots: int) -> list[list[int]]:
        chats = [Chat(prompt, seed + i, 1.0, 15) for i, prompt in enumerate(PROMPTS)]
        answers = Decoder(model[0], num_slots=slots, max_tokens=64).answer(chats)
        return [each.output_ids for each in sorted(answers, key=lambda each: each.number)]

    assert said(0, 2) == said(0, 4) != said(9, 2)


@torch.inference_mode()
def test_states_are_those_that_the_next_token_came_from(
    model: tuple[Path, torch.nn.Module],
) -> None:
    folder, reference = model
    (answer,) = Decoder(folder, num_slots=1, max_tokens=64).answer(
        [Chat(PROMPTS[0], 0, 0.0, 6)], lambda age, number: age in (0, 4)
    )
    assert [age for age, _ in answer.hidden] == [0, 4]
    for age, states in answer.hidden:
        ids = torch.tensor([[*PROMPTS[0], *answer.output_ids[:age]]])
        layers = reference(ids, output_hidden_states=True).hidden_states
        # The last of transformers' is after the norm.
        for mine, theirs in zip(states[:-1], layers[1:-1], strict=True):
            torch.testing.assert_close(
                torch.tensor(mine), theirs[0, -1].half(), atol=2e-3, rtol=1e-2
            )


def test_what_does_not_fit_is_refused(model: tuple[Path, torch.nn.Module]) -> None:
    decoder = Decoder(model[0], num_slots=1, max_tokens=16)
    with pytest.raises(ValueError, match="more than 16 tokens"):
        list(decoder.answer([Chat(PROMPTS[0], 0, 0.0, 12)]))
