"""Loads workloads of real prompts from a folder of datasets. Each function says which lengths are
real.

load_mixed: four classes, two of short and two of long answers.

    instruction     Alpaca prompts, each with the length of text-davinci-003's own answer.
    chat            AlpacaEval prompts, each with the length of CHAT_MODEL's own answer.
    summarization   PubMed abstracts to summarize. No model's answers come with them: lengths are
                    drawn from turbo-16k-0613's summaries of L-Eval documents.
    writing         Document-writing prompts in English of at most 1024 tokens. No model's answers
                    come with them: lengths are drawn from internlm2-chat-20b-ExPO's answers to
                    those AlpacaEval prompts that ask to write something.

A drawn length depends only on the prompt's hash. So within these two classes no predictor can be
better than the distribution of the class, and results understate the gain of predictors on real
traffic.

All functions raise WorkloadError for an unusable file or row, and name it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.workloads.catalogue import data_files, files_of
from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, stable_hash
from predictor_store.cached_file import expanded
from predictor_store.logs.errors import DatasetError
from predictor_store.logs.rows import raw_rows

INSTRUCTION_MODEL = "text-davinci-003"
CHAT_MODEL = "Meta-Llama-3-8B-Instruct"
SUMMARY_MODEL = "turbo-16k-0613"
WRITING_MODEL = "internlm2-chat-20b-ExPO"
SAMPLED_MODEL = "dvruette/oasst-pythia-12b-6000-steps"
RANKED_MODEL = "Meta-Llama-3.1-8B-Instruct"
_MAX_WRITING_PROMPT_TOKENS = 1024
_ASKS_TO_WRITE = re.compile(
    r"^\W*(please |can you |could you |help me )*(write|compose|draft|create|generate)\b", re.I
)
# Longer answers are loops.
_MOST_TOKENS = 4096
# The popularity of the k-th prompt is proportional to k ** -ZIPF.
ZIPF = 1.0
# The number of samples of one prompt that arrive together.
NUM_SAMPLES = 8
# The levels of ServeGen's quantiles, and an end for the tail: twice its last quantile.
_LEVELS = np.array([0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99])
_LONGEST = 2.0


def given(data: Path | None, what: str, workload: str, arrivals: str = "") -> Path:
    """Return the folder of datasets. Raises WorkloadError if there is none, or if it lacks one of
    the files that `what`, a workload or its arrivals, needs."""
    files = [data_files()[name].path for name in files_of(workload, arrivals)]
    if data is None:
        raise WorkloadError(
            f"{what} needs datasets: --data DIR names the folder with {', '.join(files)}. "
            "`sage-sched bench data` says where publishers offer them"
        )
    if missing := [file for file in files if not expanded(str(data / file)).is_file()]:
        raise WorkloadError(f"--data {data} lacks {', '.join(missing)}, which {what} needs")
    return data


def load_mixed(folder: Path) -> Workload:
    """Return the workload of the four classes that the module describes."""
    alpaca = list(rows_of(folder, "alpaca_eval", prompt=str, model=str, output_tokens=int))
    summaries = [
        row["output_tokens"]
        for row in rows_of(folder, "longdoc_leval", model=str, task=str, output_tokens=int)
        if row["model"] == SUMMARY_MODEL and row["task"].endswith("_summ")
    ]
    writings = [
        row["output_tokens"]
        for row in alpaca
        if row["model"] == WRITING_MODEL and _ASKS_TO_WRITE.match(row["prompt"])
    ]
    requests = [
        WorkloadRequest(row["prompt"], row["output_tokens"], "instruction")
        for row in rows_of(folder, "alpaca_davinci003", prompt=str, model=str, output_tokens=int)
        if row["model"] == INSTRUCTION_MODEL
    ]
    requests += [
        WorkloadRequest(row["prompt"], row["output_tokens"], "chat")
        for row in alpaca
        if row["model"] == CHAT_MODEL
    ]
    requests += [
        WorkloadRequest(row["prompt"], _drawn(summaries, row["prompt"]), "summarization")
        for row in rows_of(folder, "prompts_pubmed", prompt=str)
    ]
    requests += [
        WorkloadRequest(row["prompt"], _drawn(writings, row["prompt"]), "writing")
        for row in rows_of(folder, "prompts_document_write", prompt=str, prompt_tokens=int)
        if row["prompt_tokens"] <= _MAX_WRITING_PROMPT_TOKENS
        and sum(map(str.isascii, row["prompt"])) > 0.97 * len(row["prompt"])  # English
    ]
    return Workload.split(
        [request for request in requests if request.output_tokens >= 1],
        f"real prompts: Alpaca with {INSTRUCTION_MODEL}'s lengths; AlpacaEval with "
        f"{CHAT_MODEL}'s; PubMed summaries, lengths "
        f"drawn from {SUMMARY_MODEL} on L-Eval; document writing, lengths drawn from "
        f"{WRITING_MODEL} on AlpacaEval's writing prompts",
    )


def load_real(folder: Path) -> Workload:
    """Return prompts of four kinds of task, each with the length of CHAT_MODEL's own answer to
    it."""
    requests = [
        WorkloadRequest(row["prompt"], min(row["output_tokens"], _MOST_TOKENS), kind)
        for name in ("alpaca_eval", "math_code_reasoning")
        for row in rows_of(folder, name, prompt=str, model=str, output_tokens=int)
        if row["model"] == CHAT_MODEL and row["output_tokens"] >= 1
        for kind in [str(row.get("task") or "chat") if name != "alpaca_eval" else "chat"]
    ]
    if not requests:
        raise WorkloadError(f"the data folder has no answers of {CHAT_MODEL}")
    return Workload.split(
        requests,
        f"real prompts, each with the length of {CHAT_MODEL}'s own answer to it: AlpacaEval "
        "(chat), GSM8K and MATH (mathematics), CRUX (code); nothing is drawn",
    )


def load_repeated(folder: Path) -> Workload:
    """Return prompts that come again and again, some reworded, each time with another of
    SAMPLED_MODEL's answers. Half of the requests are history, and the other half is for
    evaluation."""
    answers = _sampled_lengths(folder)
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


def load_samples(folder: Path) -> Workload:
    """Return groups of NUM_SAMPLES of SAMPLED_MODEL's answers to the same prompt, as RL samples
    them."""
    requests = [
        WorkloadRequest(prompt, length, "samples")
        for prompt, lengths in _sampled_lengths(folder).items()
        if len(lengths) >= NUM_SAMPLES
        for length in lengths[:NUM_SAMPLES]
    ]
    if not requests:
        raise WorkloadError(f"the data folder has no {NUM_SAMPLES} answers of {SAMPLED_MODEL}")
    split = Workload.split(
        requests,
        f"real prompts, each with the lengths of {NUM_SAMPLES} of {SAMPLED_MODEL}'s own answers",
    )
    return replace(split, num_samples=NUM_SAMPLES)


def _sampled_lengths(folder: Path) -> dict[str, list[int]]:
    """Return the lengths of SAMPLED_MODEL's sampled answers, by prompt."""
    answers = defaultdict[str, list[int]](list)
    for row in rows_of(folder, "oasst_model_eval", prompt=str, model=str, output_tokens=int):
        is_sampled = not row.get("greedy") and row.get("sampling") != "contrastive"
        if row["model"] == SAMPLED_MODEL and is_sampled and row["output_tokens"] >= 1:
            answers[row["prompt"]].append(min(row["output_tokens"], _MOST_TOKENS))
    return answers


def load_reasoning(folder: Path) -> Workload:
    """Return math and code prompts with the answer lengths of a reasoning model.

    The data has no reasoning model's answers to these prompts. So each length comes from a
    reasoning model's published traffic (ServeGen's deepseek-r1: quantiles per client and time of
    day). It is the quantile at the rank that RANKED_MODEL's own answer to the same prompt has among
    that model's answers. So a prompt predicts this length as well as it predicts that model's.
    """
    own = {
        row["prompt"]: row["output_tokens"]
        for row in rows_of(folder, "math_code_reasoning", prompt=str, model=str, output_tokens=int)
        if row["model"] == RANKED_MODEL
    }
    if not own:
        raise WorkloadError(f"the data folder has no answers of {RANKED_MODEL}")
    levels, lengths = _quantiles(folder)
    # The prompt's hash breaks the many ties.
    ranked = sorted(own, key=lambda prompt: (own[prompt], stable_hash("rank of " + prompt)))
    ranks = (np.arange(len(ranked)) + 0.5) / len(ranked)
    answers = np.exp(np.interp(ranks, levels, np.log(lengths))).astype(int).tolist()
    requests = [
        WorkloadRequest(prompt, length, "reasoning")
        for prompt, length in zip(ranked, answers, strict=True)
    ]
    return Workload.split(
        requests,
        "real math and code prompts; lengths with the quantiles of a reasoning model's published "
        f"traffic (deepseek-r1), by the rank of {RANKED_MODEL}'s own answer to the prompt",
    )


def load_shift(folder: Path) -> Workload:
    """Return chat prompts with the lengths of CHAT_MODEL's own answers, and the prompts of
    load_reasoning."""
    chats = [
        WorkloadRequest(row["prompt"], min(row["output_tokens"], _MOST_TOKENS), "chat")
        for row in rows_of(folder, "alpaca_eval", prompt=str, model=str, output_tokens=int)
        if row["model"] == CHAT_MODEL and row["output_tokens"] >= 1
    ]
    reasoning = load_reasoning(folder)
    return Workload.split(
        [*chats, *reasoning.history, *reasoning.evaluation],
        f"AlpacaEval, each with the length of {CHAT_MODEL}'s own answer; "
        f"and {reasoning.description}",
    )


def _quantiles(folder: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return levels and lengths: the mean of all clients and times of day, with equal weights."""
    rows = [
        row["output"]
        for row in rows_of(folder, "servegen_r1_length_quantiles", source=str)
        if row.get("output")
    ]
    if not rows:
        raise WorkloadError("servegen_r1_length_quantiles has no quantiles of outputs")
    quantiles = np.array([row["q"] for row in rows])
    lengths = quantiles.mean(axis=0)
    ends = [lengths[0] / _LONGEST, *lengths, lengths[-1] * _LONGEST]
    return np.array([0.0, *_LEVELS, 1.0]), np.array(ends)


def rows_of(folder: Path, name: str, **fields: type) -> Iterator[Mapping[str, Any]]:
    """Return the rows of folder/name.jsonl.gz, each with these fields of these types."""
    return checked_rows(folder / f"{name}.jsonl.gz", **fields)


def checked_rows(path: Path, **fields: Any) -> Iterator[Mapping[str, Any]]:
    """Return the rows of a file, each with these fields of these types."""
    try:
        for place, row in raw_rows(str(path)):
            for field, wanted in fields.items():
                if not isinstance(row, dict) or not isinstance(row.get(field), wanted):
                    raise WorkloadError(f"{place} has no {field} of type {wanted}")
            yield row
    except DatasetError as error:
        raise WorkloadError(str(error)) from error


def rows_with(path: Path, *fields: str) -> list[dict[str, Any]]:
    """Return the rows of a file that have these fields, at least one."""
    rows = (dict(row) for row in checked_rows(path) if isinstance(row, dict))
    found = [row for row in rows if all(row.get(field) is not None for field in fields)]
    if not found:
        raise WorkloadError(f"{path} has no rows with {', '.join(fields)}")
    return found


def _drawn(lengths: list[int], prompt: str) -> int:
    if not lengths:
        raise WorkloadError(
            "the data folder has no lengths of the models named in bench/workloads/datasets.py"
        )
    return lengths[stable_hash("length of " + prompt) % len(lengths)]
