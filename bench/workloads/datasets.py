"""A mixed workload of real prompts and real models' answer lengths, from a folder of datasets.

Four classes, two of short and two of long answers:

instruction     Alpaca prompts, each with the length of text-davinci-003's own answer.
chat            AlpacaEval prompts, each with the length of Meta-Llama-3-8B-Instruct's own answer.
summarization   PubMed abstracts to summarize. No model's answers come with them: lengths are drawn
                from turbo-16k-0613's summaries of L-Eval documents.
writing         Document-writing prompts in English of at most 1024 tokens. No model's answers come
                with them: lengths are drawn from internlm2-chat-20b-ExPO's answers to those
                AlpacaEval prompts that ask to write something.

A drawn length depends on nothing but the prompt's hash: within these two classes no predictor can
do better than the class's distribution, which understates what one could do on real traffic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, stable_hash
from predictor_store.data.files import DatasetError, raw_rows

INSTRUCTION_MODEL = "text-davinci-003"
CHAT_MODEL = "Meta-Llama-3-8B-Instruct"
SUMMARY_MODEL = "turbo-16k-0613"
WRITING_MODEL = "internlm2-chat-20b-ExPO"
_MAX_WRITING_PROMPT_TOKENS = 1024
_ASKS_TO_WRITE = re.compile(
    r"^\W*(please |can you |could you |help me )*(write|compose|draft|create|generate)\b", re.I
)


def load(folder: Path) -> Workload:
    """The workload above. Raises WorkloadError, naming file and row, where one is unusable."""
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
        if row["prompt_tokens"] <= _MAX_WRITING_PROMPT_TOKENS and _is_english(row["prompt"])
    ]
    return Workload.split(
        [request for request in requests if request.output_tokens >= 1],
        f"real prompts: Alpaca with {INSTRUCTION_MODEL}'s lengths; AlpacaEval with "
        f"{CHAT_MODEL}'s; PubMed summaries, lengths "
        f"drawn from {SUMMARY_MODEL} on L-Eval; document writing, lengths drawn from "
        f"{WRITING_MODEL} on AlpacaEval's writing prompts",
    )


def rows_of(folder: Path, name: str, **fields: type) -> Iterator[Mapping[str, Any]]:
    """The rows of folder/name.jsonl.gz, each with these fields of these types. Raises
    WorkloadError, naming the row, where one has not."""
    try:
        for place, row in raw_rows(str(folder / f"{name}.jsonl.gz")):
            for field, wanted in fields.items():
                if not isinstance(row, dict) or not isinstance(row.get(field), wanted):
                    raise WorkloadError(f"{place} has no {field} of type {wanted.__name__}")
            yield row
    except DatasetError as error:
        raise WorkloadError(str(error)) from error


def _drawn(lengths: list[int], prompt: str) -> int:
    if not lengths:
        raise WorkloadError(
            "the data folder has no lengths of the models named in bench/workloads/datasets.py"
        )
    return lengths[stable_hash("length of " + prompt) % len(lengths)]


def _is_english(text: str) -> bool:
    return sum(character.isascii() for character in text) > 0.97 * len(text)
