"""Queues per expert compute what experts in one product do, whoever comes meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from bench.overhead.expert_price import Launches, main, queued
from bench.overhead.expert_queues import EXPERTS, LAYERS, VOCABULARY, ExpertQueues, Model, Sequence

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


MODEL = Model()


def prompts(number: int, seed: int) -> list[torch.Tensor]:
    script = random.Random(seed)
    return [
        torch.tensor([script.randrange(VOCABULARY) for _ in range(script.randint(1, 90))])
        for _ in range(number)
    ]


def differs(sequence: Sequence, tokens: torch.Tensor) -> float:
    """From the logits of the experts in one product: they round otherwise, and no more."""
    assert sequence.logits is not None
    return float((sequence.logits - MODEL.forward(tokens)).abs().max())


@pytest.mark.parametrize("seed", range(2))
def test_whoever_comes_between_two_experts_all_say_what_they_say_alone(seed: int) -> None:
    script, waiting = random.Random(seed), prompts(8, seed)
    queues, came, num_steps = ExpertQueues(MODEL), list[Sequence](), 0
    while queues.step() or waiting:
        num_steps += 1
        if waiting and script.random() < 0.05:
            came.append(queues.arrive(waiting.pop(0), script.random() < 0.3))
    assert num_steps > 8 * LAYERS
    for sequence, tokens in zip(came, prompts(8, seed), strict=True):
        assert differs(sequence, tokens) < 1e-4
        assert sequence.logits is not None
        assert sequence.logits.argmax() == MODEL.forward(tokens).argmax()


def test_what_waits_in_a_queue_counts() -> None:
    tokens = prompts(1, 0)[0]
    queues = ExpertQueues(MODEL)
    sequence = queues.arrive(tokens)
    queues.step()
    (_, rows, given, weights) = next(iter(queues._queues.values()))[0]
    next(iter(queues._queues.values()))[0] = (sequence, rows, given * 0, weights)
    while queues.step():
        pass
    assert differs(sequence, tokens) > 1e-3


def test_an_urgent_one_passes_between_two_experts() -> None:
    queues, (long, short) = ExpertQueues(MODEL), prompts(2, 1)
    first = queues.arrive(torch.cat([long] * 5))
    for _ in range(3):
        queues.step()
    second = queues.arrive(short, is_urgent=True)
    while second.logits is None:
        queues.step()
    assert first.logits is None
    assert first.layer <= 1  # by what it shares with the other


def test_a_launch_an_expert_and_layer_not_one_a_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = prompts(1, 2)[0].repeat(10)
    with Launches() as grouped:
        MODEL.forward(tokens)
    with Launches() as apart:
        queued(MODEL, tokens)
    # An expert takes two products and what is between them.
    assert apart.num - grouped.num > LAYERS * (EXPERTS - 1) * 3
    monkeypatch.setattr("bench.overhead.expert_price._REPEATS", 1)
    main()
    assert "16 tokens: " in capsys.readouterr().out
