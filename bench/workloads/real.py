"""Prompts of which every answer's length is one model's own answer to that very prompt.

`load`: one model (MODEL) in four kinds of task: chat (AlpacaEval), grade-school mathematics, hard
mathematics, and code. `load_repeated`: prompts that come again and again, some of them reworded,
each time with another of the answers that one model (SAMPLED_MODEL) gave to that prompt.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from bench.workloads.datasets import CHAT_MODEL, rows_of
from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, stable_hash

MODEL = CHAT_MODEL
SAMPLED_MODEL = "dvruette/oasst-pythia-12b-6000-steps"
# Longer ones are loops that nobody asked for.
_MOST_TOKENS = 4096
# Popularity of the k-th prompt: k to the minus this.
ZIPF = 1.0


def load(folder: Path) -> Workload:
    """Raises WorkloadError, naming file and row, where one is unusable."""
    requests = [
        WorkloadRequest(row["prompt"], min(row["output_tokens"], _MOST_TOKENS), kind)
        for name in ("alpaca_eval", "math_code_reasoning")
        for row in rows_of(folder, name, prompt=str, model=str, output_tokens=int)
        if row["model"] == MODEL and row["output_tokens"] >= 1
        for kind in [str(row.get("task") or "chat") if name != "alpaca_eval" else "chat"]
    ]
    if not requests:
        raise WorkloadError(f"the data folder has no answers of {MODEL}")
    return Workload.split(
        requests,
        f"real prompts, each with the length of {MODEL}'s own answer to it: AlpacaEval (chat), "
        "GSM8K and MATH (mathematics), CRUX (code); nothing is drawn",
    )


def load_repeated(folder: Path) -> Workload:
    """Of each prompt's answers one half is history, and the other half comes. Raises WorkloadError
    as load does."""
    answers = defaultdict[str, list[int]](list)
    for row in rows_of(folder, "oasst_model_eval", prompt=str, model=str, output_tokens=int):
        is_sampled = not row.get("greedy") and row.get("sampling") != "contrastive"
        if row["model"] == SAMPLED_MODEL and is_sampled and row["output_tokens"] >= 1:
            answers[row["prompt"]].append(min(row["output_tokens"], _MOST_TOKENS))
    known = {prompt: lengths for prompt, lengths in answers.items() if len(lengths) > 1}
    if not known:
        raise WorkloadError(f"the data folder has no repeated answers of {SAMPLED_MODEL}")
    history, evaluation = list[WorkloadRequest](), list[WorkloadRequest]()
    for prompt, lengths in known.items():
        first = stable_hash("which half " + prompt) % 2
        for number, length in enumerate(lengths):
            half = history if number % 2 == first else evaluation
            half.append(WorkloadRequest(prompt, length, "repeated"))
    return Workload(
        tuple(history),
        tuple(evaluation),
        f"{len(known)} real prompts that come again by Zipf's law, a third of them reworded, each "
        f"time with another of {SAMPLED_MODEL}'s own answers to that prompt",
        ZIPF,
    )
