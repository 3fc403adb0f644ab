"""Fits and writes the shipped general knowledge of lengths: `python -m bench.predictor.general`.

It uses the sets of bench.predictor.answers, without the prompts that the benches serve, and writes
only coefficients. Each set is centred, because its level depends on its model. `sage-sched bench
predictor --data DIR` shows how well the coefficients rank the prompts of a set that they were not
fitted to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.predictor.answers import SETS, by_prompt, read, shuffled
from bench.workloads import datasets
from bench.workloads.predictors import embedded
from bench.workloads.prompts import WorkloadError
from predictor_store.logs.errors import DatasetError
from predictor_store.predict.embedder import Embedder, fingerprint
from predictor_store.predict.regression import SHIPPED_FILE, GeneralLength
from sage_sched.app.config import ENCODERS

Array = NDArray[np.float64]
_MOST_ANSWERS = 2_500
# The maximum number of prompts that counts for a set's weight.
_MOST_WEIGHT = 1_500
# Values from 1 to 3 work equally well.
_RIDGE = 1.0
_NUM_QUANTILES = 24
# A set that shares more prompts than this with the held-out set is not used.
_MOST_SHARED = 0.1


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a set.

    vectors: shape (prompts, dimension).
    logs: the mean logarithm of the lengths of each prompt's answers, shape (prompts,).
    """

    prompts: Sequence[str]
    vectors: Array
    logs: Array

    @classmethod
    def read(cls, folder: Path, name: str, embedder: Embedder) -> Self:
        """Read a set. Raises DatasetError."""
        groups = by_prompt(shuffled(read(folder, name), 1)[:_MOST_ANSWERS])
        prompts = [answers[0].prompt for answers in groups]
        logs = [np.mean(np.log([max(1, a.output_tokens) for a in answers])) for answers in groups]
        vectors = tqdm(embedded(embedder, prompts), f"embedding {name}", len(prompts), leave=False)
        return cls(prompts, np.array([*vectors], np.float64), np.array(logs))

    def without(self, prompts: Collection[str]) -> PromptSet:
        kept = [i for i, prompt in enumerate(self.prompts) if prompt not in prompts]
        return PromptSet([self.prompts[i] for i in kept], self.vectors[kept], self.logs[kept])


def read_sets(folder: Path, embedder: Embedder) -> dict[str, PromptSet]:
    """Return the sets by name. Raises DatasetError."""
    return {name: PromptSet.read(folder, name, embedder) for name in SETS}


def fit(used: Sequence[PromptSet], encoder: str) -> GeneralLength:
    """Return a model of lengths fitted to all prompts of these sets.

    The spread of its predictions, and its errors, are right for held-out sets.
    """
    others = [_weights([other for other in used if other is not each]) for each in used]
    said = [_centred(each.vectors @ other) for each, other in zip(used, others, strict=True)]
    came = [_centred(each.logs) for each in used]
    moments = [(np.mean(x * y), np.mean(x * x)) for x, y in zip(said, came, strict=True)]
    share = float(np.divide(*np.sum(moments, axis=0)))
    weights = share * _weights(used)
    errors = [y - share * x for x, y in zip(said, came, strict=True)]
    # See GeneralLength.level_after.
    levels = [(each.logs - each.vectors @ weights).mean() for each in used]
    worth = float(np.mean([each.var() for each in errors]) / np.var(levels, ddof=1))
    logs = _quantiles(np.concatenate([_quantiles(each.logs) for each in used]))
    errors_of_all = np.mean([_quantiles(each) for each in errors], axis=0)
    level = float(np.mean(levels))
    return GeneralLength(fingerprint(encoder), weights, errors_of_all, level, worth, logs)


def held_out(
    sets: Collection[PromptSet], encoder: str, prompts: Collection[str]
) -> GeneralLength | None:
    """Return fit() without these prompts, and without sets that share many of them; None if at most
    one set is left."""
    left = [(each, each.without(prompts)) for each in sets]
    used = [
        rest for each, rest in left if len(rest.prompts) >= (1 - _MOST_SHARED) * len(each.prompts)
    ]
    return fit(used, encoder) if len(used) > 1 else None


def _weights(sets: Sequence[PromptSet]) -> Array:
    dimension = sets[0].vectors.shape[1]
    gram: Array = _RIDGE * np.eye(dimension)
    product: Array = np.zeros(dimension)
    for each in sets:
        x: Array = each.vectors - each.vectors.mean(0)
        weight = min(1.0, _MOST_WEIGHT / len(x))
        gram = gram + weight * x.T @ x
        product = product + weight * x.T @ _centred(each.logs)
    return np.asarray(np.linalg.solve(gram, product), np.float64)


def _centred(values: Array) -> Array:
    return np.asarray(values - values.mean())


def _quantiles(values: Array) -> Array:
    found: Array = np.quantile(values, (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES)
    return found


def write(general: GeneralLength, encoder: str, file: Path = SHIPPED_FILE) -> None:
    """Write the fit to the file, next to the fits of the other encoders."""
    shipped = json.loads(file.read_text("ascii")) if file.exists() else {}
    shipped[encoder] = {name: _shown(value) for name, value in asdict(general).items()}
    file.write_text(json.dumps(shipped, indent=1) + "\n", "ascii")


def _shown(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_shown(float(number)) for number in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--encoder", choices=ENCODERS, default=ENCODERS[0])
    args = parser.parse_args()
    try:
        # The prompts that the benches serve must not be used.
        evaluated = {request.prompt for request in datasets.load_mixed(args.data).evaluation}
        sets = read_sets(args.data, Embedder(args.encoder))
    except (DatasetError, WorkloadError) as error:
        print(f"general: {error}", file=sys.stderr)
        return 2
    used = [each.without(evaluated) for each in sets.values()]
    write(fit(used, args.encoder), args.encoder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
