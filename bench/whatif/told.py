"""What a policy is told of a log's answers beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engines.simulator.presets import Engine
from bench.engines.simulator.result import alone_s
from bench.whatif.foresight import Foresight
from bench.whatif.log import Logged
from bench.whatif.supposed import LEAST_GAIN, MOST_GAIN, USUAL_GAIN, Supposed
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution

# A smaller share of requests without a prediction makes no difference that is worth simulating.
_FEW = 0.05
_NUM_ATOMS = 64

Forecasts = Sequence[LengthDistribution | None]


@dataclass(frozen=True, slots=True)
class Told:
    """What a predictor says of all requests; or several such, each as likely.

    usual: the first so many are what is to be expected; the others show what better and worse
    predictions would change. description: for people. quality: see Foresight; {} if supposed.
    """

    variants: tuple[Forecasts, ...]
    usual: int
    description: str
    quality: dict[str, Any]


def told_of(
    requests: Sequence[Logged],
    engine: Engine,
    config: SageConfig,
    *,
    store: Path | None,
    gain: float | None,
    num_seeds: int,
) -> Told:
    """By the log's own predictions, by its prompts, or supposed: whatever there is of each request.
    gain: of supposed predictions, if it is known. Raises StoreError."""
    ends_s = [
        each.arrival_s + (each.ttlt_s or alone_s(engine, each.input_tokens, each.output_tokens))
        for each in requests
    ]
    said: list[LengthDistribution | None] = [each.forecast for each in requests]
    by_prompt, quality = 0, dict[str, Any]()
    if any(each.prompt and found is None for each, found in zip(requests, said, strict=True)):
        foresight = Foresight(config, store)
        made = foresight.predictions(requests, ends_s)
        by_prompt = sum(a is None and b is not None for a, b in zip(said, made, strict=True))
        said = [a if a is not None else b for a, b in zip(said, made, strict=True)]
        quality = foresight.quality()
    missing = sum(found is None for found in said)
    parts = {
        "recorded in shadow mode": len(requests) - missing - by_prompt,
        "made from prompts": by_prompt,
    }
    lengths = [each.output_tokens for each in requests]
    variants: tuple[Forecasts, ...] = (said,)
    usual = 1
    if missing < _FEW * len(requests):
        # As a server has it for requests that go on without a prediction.
        blind = LengthDistribution.from_samples(lengths, "prior").compressed(_NUM_ATOMS)
        variants = ([blind if found is None else found for found in said],)
        parts["of all lengths"] = missing
    else:
        gains = [gain] if gain is not None else [USUAL_GAIN, LEAST_GAIN, MOST_GAIN]
        variants, usual = _supposed(said, lengths, gains, num_seeds), num_seeds
        worths = ", ".join(f"{worth:.2f}" for worth in gains)
        parts[f"supposed (CRPS gain {worths})"] = missing
    description = ", ".join(f"{count} {how}" for how, count in parts.items() if count)
    return Told(variants, usual, description, quality)


def _supposed(
    said: Forecasts, lengths: Sequence[int], gains: Sequence[float], num_seeds: int
) -> tuple[Forecasts, ...]:
    """What is said, and where nothing is, predictions of each of the gains, with so many seeds."""
    supposed = Supposed(lengths)
    variants = []
    for gain in gains:
        for seed in range(num_seeds):
            noisy = supposed.predictions(gain, seed)
            variants.append(
                [other if one is None else one for one, other in zip(said, noisy, strict=True)]
            )
    return tuple(variants)
