"""Requests to a stock server, with --sage-shadow and without."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.engines.server.server import Server
from tests.engine import stage
from tests.engine.serving import generate

# It orders by prompt length, then by arrival.
POLICY = "shortest-prefill-first"
SECRET = "Never write this down"
PROMPTS = {
    "long": f"{SECRET}: " + "tell me of the dragon and the seven seas. " * 12,
    "short": f"{SECRET}.",
    "middle": f"{SECRET}: " + "what do they mean? " * 6,
    "same": f"{SECRET}!",
    "chatty": f"{SECRET}: " + "why? " * 10,
}


@dataclass(frozen=True)
class Served:
    """order: in which requests started. answers: their texts, tokens and log probabilities."""

    order: list[str]
    answers: list[tuple[str, list[Any]]]


def serve(server: Server) -> Served:
    own = [{"custom_params": {"sage_lengths": [1, 2], "own": i}} for i in range(len(PROMPTS))]
    ask = partial(generate, server, return_logprob=True)
    calls = [
        partial(ask, text, 9 + i, rid=name, sampling_params=own[i])
        for i, (name, text) in enumerate(PROMPTS.items())
    ]
    said = stage.together(server, calls)
    answers = [(answer["text"], answer["meta_info"]["output_token_logprobs"]) for answer in said]
    return Served(stage.started(server), answers)
