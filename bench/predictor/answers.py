"""Streams of answered prompts that the predictors are tried on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.workloads import datasets
from predictor_store.data.datasets import Reader
from predictor_store.data.warm import Observation

# As degenerate loops end up there.
MAX_TOKENS = 4096
# File and filters of each set in the data folder; one model's answers each.
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
MIXED, ALL, SWITCH = "mixed", "all", "switch"
_EACH = 900
_BEFORE_SWITCH = 2_000
_TRAIN_SHARE, _VALIDATION_SHARE = 0.6, 0.1


class Parts(NamedTuple):
    train: list[Observation]
    validation: list[Observation]
    test: list[Observation]


def stream(folder: Path, name: str, seed: int = 0) -> list[Observation]:
    """The set of this name, MIXED (the classes of bench.workloads.datasets, alike often), ALL (some
    of each set) or SWITCH (medical chats, and then instructions). Raises DatasetError,
    WorkloadError."""
    if name == MIXED:
        workload = datasets.load(folder)
        classes: dict[str, list[Observation]] = {}
        for request in (*workload.history, *workload.evaluation):
            observation = Observation(request.prompt, request.output_tokens)
            classes.setdefault(request.class_name, []).append(observation)
        size = min(len(observations) for observations in classes.values())
        chosen = [shuffled(observations, seed)[:size] for observations in classes.values()]
        return shuffled([o for observations in chosen for o in observations], seed)
    if name == ALL:
        chosen = [shuffled(read(folder, other), seed)[:_EACH] for other in SETS]
        return shuffled([o for observations in chosen for o in observations], seed)
    if name == SWITCH:
        parts = [shuffled(read(folder, part), seed) for part in ("medical", "alpaca")]
        return [o for part in parts for o in part[:_BEFORE_SWITCH]]
    return shuffled(read(folder, name), seed)


def read(folder: Path, name: str) -> list[Observation]:
    file, filters = SETS[name]
    return observations(str(folder / f"{file}.jsonl.gz"), filters)


def observations(dataset: str, filters: Mapping[str, str]) -> list[Observation]:
    """Of any dataset that `sage-sched warm` reads. Raises DatasetError."""
    found = []
    for row in Reader(dataset, filters=filters):
        assert row.output_tokens is not None  # the reader has seen to it
        length = min(row.output_tokens, MAX_TOKENS)
        found.append(Observation(row.prompt, length, row.input_tokens, row.censored))
    return found


def shuffled(observations: Sequence[Observation], seed: int) -> list[Observation]:
    """In random order, all answers to one prompt together: they are split by prompt."""
    rng = np.random.default_rng(seed)
    prompts = list(dict.fromkeys(observation.prompt for observation in observations))
    place = {prompts[j]: i for i, j in enumerate(rng.permutation(len(prompts)))}
    return sorted(observations, key=lambda observation: place[observation.prompt])


def by_prompt(observations: Sequence[Observation]) -> list[list[Observation]]:
    """The answers to each prompt, where those to one prompt follow one another."""
    groups = itertools.groupby(observations, key=lambda observation: observation.prompt)
    return [list(answers) for _, answers in groups]


def split(observations: Sequence[Observation]) -> Parts:
    """In order, no prompt in two parts: 60 % of the prompts, 10 % and 30 %. Answers to one prompt
    have to follow one another."""
    groups = by_prompt(observations)
    first = round(_TRAIN_SHARE * len(groups))
    second = round((_TRAIN_SHARE + _VALIDATION_SHARE) * len(groups))
    parts = (groups[:first], groups[first:second], groups[second:])
    return Parts(*(list(itertools.chain.from_iterable(part)) for part in parts))
