"""Reads answered prompts of a data folder, on which predictors are tested."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.workloads import datasets
from predictor_store.data.observations import Observation, Observations
from predictor_store.logs.reader import ReadOptions

# Longer answers are loops.
MAX_TOKENS = 4096
# The file and filters of each set in the data folder; each set has one model's answers.
SETS: dict[str, tuple[str, dict[str, str]]] = {
    "alpaca": ("alpaca_davinci003", {}),
    "alpaca_eval": ("alpaca_eval", {"model": "Meta-Llama-3-8B-Instruct"}),
    "math_code": ("math_code_reasoning", {"model": "Meta-Llama-3.1-8B-Instruct"}),
    "medical": ("medical_chatdoctor5k", {}),
    "longdoc": ("longdoc_leval", {"model": "turbo-16k-0613"}),
    "oasst": (
        "oasst_model_eval",
        {"model": "dvruette/oasst-pythia-12b-6000-steps", "greedy": "false"},
    ),
    "vicuna7b": ("vicuna7b_alpaca_text_aligned", {}),
    "sharegpt": ("sharegpt_prompts", {}),
}
MIXED = "mixed"


def stream(folder: Path, name: str, seed: int = 0) -> list[Observation]:
    """Return the answers of a set in random order. The set MIXED has equal numbers of each class of
    bench.workloads.datasets. Raises DatasetError, WorkloadError."""
    if name != MIXED:
        return shuffled(read(folder, name), seed)
    workload = datasets.load_mixed(folder)
    classes: dict[str, list[Observation]] = {}
    for request in (*workload.history, *workload.evaluation):
        observation = Observation(request.prompt, request.output_tokens)
        classes.setdefault(request.class_name, []).append(observation)
    size = min(map(len, classes.values()))
    chosen = [shuffled(observations, seed)[:size] for observations in classes.values()]
    return shuffled([*itertools.chain.from_iterable(chosen)], seed)


def read(folder: Path, name: str) -> list[Observation]:
    """Return one of SETS. Raises DatasetError."""
    file, filters = SETS[name]
    return observations(str(folder / f"{file}.jsonl.gz"), filters)


def observations(dataset: str, filters: Mapping[str, str]) -> list[Observation]:
    """Return the answers of any dataset that `sage-sched warm` reads. Raises DatasetError."""
    return [
        replace(row, output_tokens=min(row.output_tokens, MAX_TOKENS))
        for row in Observations([dataset], ReadOptions(filters=filters))
    ]


def shuffled(observations: Sequence[Observation], seed: int) -> list[Observation]:
    """Return the answers in random order, but all answers to one prompt together."""
    rng = np.random.default_rng(seed)
    prompts = list(dict.fromkeys(observation.prompt for observation in observations))
    place = {prompts[j]: i for i, j in enumerate(rng.permutation(len(prompts)))}
    return sorted(observations, key=lambda observation: place[observation.prompt])


def by_prompt(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Return the answers to each prompt, if they follow one another."""
    groups = itertools.groupby(observations, key=lambda observation: observation.prompt)
    return [list(answers) for _, answers in groups]
