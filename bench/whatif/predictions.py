"""Predicts a log's answers for the policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.simulator.presets import Engine
from bench.simulator.result import alone_s
from bench.whatif.log import Logged
from bench.whatif.replayed_predictor import ReplayedPredictor
from bench.workloads.supposed import LEAST_GAIN, MOST_GAIN, NUM_ATOMS, USUAL_GAIN, Supposed
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution

# Below this share, requests without a prediction make no difference worth simulating.
_FEW = 0.05

Forecasts = Sequence[LengthDistribution | None]


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of all requests, in one or several variants.

    variants: for each, the predictions by request. The first `usual` ones are of the expected
        quality; the others show the effect of better and worse predictions.
    description: for people.
    quality: see ReplayedPredictor; {} if supposed.
    """

    variants: tuple[Forecasts, ...]
    usual: int
    description: str
    quality: dict[str, Any]


def predictions_of(
    requests: Sequence[Logged],
    engine: Engine,
    config: SageConfig,
    *,
    store: Path | None,
    gain: float | None,
    num_seeds: int,
) -> Predictions:
    """Return a prediction for each request: from the log, or else from the prompt, or else a
    supposed one. Raises StoreError.

    gain: the CRPS gain of supposed predictions; None if it is unknown.
    """
    ends_s = [
        each.arrival_s + (each.ttlt_s or alone_s(engine, each.input_tokens, each.output_tokens))
        for each in requests
    ]
    said: Forecasts = [each.forecast for each in requests]
    by_prompt, quality = 0, dict[str, Any]()
    if any(each.prompt and found is None for each, found in zip(requests, said, strict=True)):
        predictor = ReplayedPredictor(config, store)
        num_known = sum(found is not None for found in said)
        said = _first(said, predictor.predictions(requests, ends_s))
        by_prompt = sum(found is not None for found in said) - num_known
        quality = predictor.quality()
    missing = sum(found is None for found in said)
    parts = {
        "recorded in shadow mode": len(requests) - missing - by_prompt,
        "made from prompts": by_prompt,
    }
    lengths = [each.output_tokens for each in requests]
    variants: tuple[Forecasts, ...] = (said,)
    usual = 1
    if missing < _FEW * len(requests):
        # A server does the same for requests that go on without a prediction.
        blind = LengthDistribution.from_samples(lengths, "prior").compressed(NUM_ATOMS)
        variants = ([blind if found is None else found for found in said],)
        parts["of all lengths"] = missing
    else:
        gains = [gain] if gain is not None else [USUAL_GAIN, LEAST_GAIN, MOST_GAIN]
        supposed, usual = Supposed(lengths), num_seeds
        noisy = (supposed.predictions(worth, seed) for worth in gains for seed in range(num_seeds))
        variants = tuple(_first(said, each) for each in noisy)
        worths = ", ".join(f"{worth:.2f}" for worth in gains)
        parts[f"supposed (CRPS gain {worths})"] = missing
    description = ", ".join(f"{count} {how}" for how, count in parts.items() if count)
    return Predictions(variants, usual, description, quality)


def _first(said: Forecasts, other: Forecasts) -> Forecasts:
    """Return `said`, with the predictions of `other` where it has none."""
    return [b if a is None else a for a, b in zip(said, other, strict=True)]
