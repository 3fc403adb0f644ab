"""What a policy is told of a log's answers beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.engines.simulator.presets import Engine
from bench.engines.simulator.result import alone_s
from bench.whatif.foresight import Foresight
from bench.whatif.log import Logged
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution

# A smaller share of requests without a prediction makes no difference that is worth simulating.
_FEW = 0.05
_NUM_ATOMS = 64
# The least, the median and the most that the default predictor gained on nine sets of answered
# prompts (docs/predictor.md).
LEAST_GAIN, USUAL_GAIN, MOST_GAIN = 0.03, 0.22, 0.41
_NUM_TRIED = 400
# Of the logarithm of a length: hardly any noise, and nothing but noise.
_LEAST_NOISE, _MOST_NOISE = 0.02, 50.0

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
    said: Forecasts = [each.forecast for each in requests]
    by_prompt, quality = 0, dict[str, Any]()
    if any(each.prompt and found is None for each, found in zip(requests, said, strict=True)):
        foresight = Foresight(config, store)
        num_known = sum(found is not None for found in said)
        said = _first(said, foresight.predictions(requests, ends_s))
        by_prompt = sum(found is not None for found in said) - num_known
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
        supposed, usual = Supposed(lengths), num_seeds
        noisy = (supposed.predictions(worth, seed) for worth in gains for seed in range(num_seeds))
        variants = tuple(_first(said, each) for each in noisy)
        worths = ", ".join(f"{worth:.2f}" for worth in gains)
        parts[f"supposed (CRPS gain {worths})"] = missing
    description = ", ".join(f"{count} {how}" for how, count in parts.items() if count)
    return Told(variants, usual, description, quality)


def _first(said: Forecasts, other: Forecasts) -> Forecasts:
    """What is said, or else the other."""
    return [b if a is None else a for a, b in zip(said, other, strict=True)]


class Supposed:
    """Predictions as good as predictors were found to be elsewhere.

    Each true length is seen through noise, and what is said is Bayes' posterior of all the log's
    lengths. So predictions are calibrated, and their worth is one number, the noise: it is chosen
    so that they save the share of the CRPS that is asked for.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        everything = LengthDistribution.from_samples(self._lengths, "prior")
        self._all = everything.compressed(_NUM_ATOMS)

    def predictions(self, gain: float, seed: int) -> list[LengthDistribution]:
        """For each, in their order. gain: of CRPS over the distribution of all lengths, 0 to 1; as
        much as can be if no noise comes to it."""
        rng = np.random.default_rng([seed, 5])
        shocks = rng.standard_normal(self._lengths.size)
        noise = self._noise_of(gain)
        return [
            self._posterior(int(length), float(shock), noise)
            for length, shock in zip(self._lengths, shocks, strict=True)
        ]

    def _noise_of(self, gain: float) -> float:
        """The gain falls as it rises."""
        rng = np.random.default_rng(6)
        tried = rng.choice(self._lengths, min(_NUM_TRIED, self._lengths.size), replace=False)
        shocks = rng.standard_normal(tried.size)
        blind = sum(self._all.crps(int(length)) for length in tried)
        if blind <= 0:
            return _MOST_NOISE
        low, high = math.log(_LEAST_NOISE), math.log(_MOST_NOISE)
        for _ in range(16):
            middle = (low + high) / 2
            said = sum(
                self._posterior(int(length), float(shock), math.exp(middle)).crps(int(length))
                for length, shock in zip(tried, shocks, strict=True)
            )
            low, high = (middle, high) if 1 - said / blind > gain else (low, middle)
        return math.exp(low)

    def _posterior(self, length: int, shock: float, noise: float) -> LengthDistribution:
        logs: NDArray[np.float64] = np.log(self._all.lengths)
        off = (math.log(length) + noise * shock - logs) / noise
        weights = self._all.weights * np.exp(-0.5 * (np.square(off) - np.square(off).min()))
        return LengthDistribution.from_samples(self._all.lengths, "history", weights)
