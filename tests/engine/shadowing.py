"""Requests to a stock server, with --sage-shadow and without."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests

from bench.engines.server.server import Server
from tests.engine import stage
from tests.engine.serving import generate

# It orders by prompt length, then by arrival.
POLICY = ["--schedule-policy", "shortest-prefill-first"]
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
    answers: dict[str, tuple[str, list[Any]]]
    state: dict[str, Any]


def serve(server: Server, dumps: Path | None = None) -> Served:
    if dumps is not None:
        told = {"dump_requests_folder": str(dumps), "dump_requests_threshold": len(PROMPTS)}
        requests.post(f"{server.url}/configure_logging", json=told).raise_for_status()
    said = stage.together(
        server,
        [
            partial(
                generate, server, text, 9 + i, rid=name, return_logprob=True,
                sampling_params={"custom_params": {"sage_lengths": [1, 2], "own": i}},
            )
            for i, (name, text) in enumerate(PROMPTS.items())
        ],
    )  # fmt: skip
    answers = {
        name: (answer["text"], answer["meta_info"]["output_token_logprobs"])
        for name, answer in zip(PROMPTS, said, strict=True)
    }
    info = requests.get(f"{server.url}/server_info", timeout=300).json()
    return Served(stage.started(server), answers, info["internal_states"][0])
