"""Answers of the real model to many prompts: `python -m bench.real_model.answers`.

They are made without a server (bench/real_model/decoder.py says why that is the same model) and
kept with their text, and hidden states if asked for, in the user's cache; a run that was broken off
goes on where it stopped. --lengths writes their lengths alone, which the repository may hold.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.real_model.decoder import Answer, Chat, Decoder
from bench.real_model.fetch import MODEL_NAME, fetch
from bench.workloads.chats import prompts, prompts_hash
from bench.workloads.prompts import stable_hash
from predictor_store.cached_file import cache_folder, own_file
from predictor_store.probe.recording import ROWS, row_type
from predictor_store.torchvision_schemas import define_missing
from sage_sched.probe import DUE_INTERVAL_TOKENS, is_due

TEMPERATURE, CAP = 0.7, 1024
# Generated ones whose lengths bench/workloads/answer_lengths.json has.
NUM_PROMPTS = 560
SESSION = "offline"
_DATASETS = ("sharegpt_prompts", "prompts_document_write", "alpaca_davinci003")
_MAX_PROMPT_CHARS, _NUM_OF_DATASET = 2500, 15
_MAX_TOKENS = 2048
_MOST_REPEATED = 16


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. kind: of the prompt, or its dataset. sample: which of the answers to this prompt.
    output_tokens: the end token counted; is_cut: it has none, as the cap came first."""

    prompt: str
    kind: str
    sample: int
    input_tokens: int
    output_tokens: int
    is_cut: bool
    text: str

    @property
    def arrival(self) -> int:
        """Names the answer in a recording of hidden states."""
        return stable_hash(f"{self.sample} {self.prompt}") >> 1


def answers_folder() -> Path:
    """Where answers and states lie."""
    return cache_folder() / "smollm2-135m-answers"


def read_answers() -> list[Answered]:
    """All that were made, in the order in which they ended."""
    path = answers_folder() / "answers.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Answered(**json.loads(line)) for line in lines]


def dataset_prompts(data: Path) -> Iterator[tuple[str, str]]:
    """A few prompts of each dataset of a folder, with its name; the same ones every time."""
    for name in _DATASETS:
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            texts = [json.loads(line)["prompt"] for line in file]
        fitting = sorted({text for text in texts if 0 < len(text) <= _MAX_PROMPT_CHARS})
        for text in random.Random(name).sample(fitting, _NUM_OF_DATASET):
            yield text, name


def chat_ids(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    """One user turn in the model's chat template, as the server's /v1/chat/completions has it."""
    turn = [{"role": "user", "content": prompt}]
    found = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)
    return tuple(found["input_ids"])


def repeated(asked: Sequence[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """Further samples, as real traffic repeats prompts: the prompt of rank r, by its hash, is asked
    _MOST_REPEATED / r times in all (Zipf's law), but at least once."""
    ranked = sorted(asked, key=lambda each: stable_hash(f"rank {each[0]}"))
    return [
        (*each, sample)
        for rank, each in enumerate(ranked, 1)
        for sample in range(1, round(_MOST_REPEATED / rank))
    ]


def make(wanted: Sequence[tuple[str, str, int]], num_slots: int, states: bool) -> None:
    """Answer what is not answered yet (prompt, kind, sample), and say how it goes. Prompts that are
    too long for the cache are left out."""
    define_missing()
    from transformers import AutoTokenizer

    model = fetch()
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    known = {(each.prompt, each.sample) for each in read_answers()}
    asked, chats = [], []
    for prompt, kind, sample in wanted:
        ids = chat_ids(tokenizer, prompt)
        if (prompt, sample) not in known and len(ids) + CAP <= _MAX_TOKENS:
            asked.append((prompt, kind, sample))
            chats.append(Chat(ids, stable_hash(f"{sample} {prompt}"), TEMPERATURE, CAP))
    folder = answers_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    num_tokens = 0
    decoder = Decoder(model, num_slots=num_slots, max_tokens=_MAX_TOKENS)
    found = decoder.answer(chats, _is_recorded if states else None)
    with open(folder / "answers.jsonl", "a", encoding="utf-8", opener=own_file) as file:
        for i, answer in enumerate(found, 1):
            prompt, kind, sample = asked[answer.number]
            is_cut = answer.output_ids[-1] != decoder.end_id
            text = tokenizer.decode(answer.output_ids, skip_special_tokens=True)
            made = Answered(
                prompt,
                kind,
                sample,
                len(answer.chat.input_ids),
                len(answer.output_ids),
                is_cut,
                text,
            )
            if states:
                _write_states(folder, made, answer)
            file.write(json.dumps(asdict(made)) + "\n")
            file.flush()
            num_tokens += made.output_tokens
            if i % 20 == 0 or i == len(chats):
                print(f"{i} of {len(chats)} answers, {num_tokens} tokens", flush=True)


def write_lengths(path: Path, number: int) -> None:
    """The lengths of the answers to the first prompts of bench/workloads/chats.py, by number."""
    lengths: dict[str, list[int]] = {}
    found = {(each.prompt, each.sample): each.output_tokens for each in read_answers()}
    asked = prompts(number)
    for i, (prompt, _) in enumerate(asked):
        of = [
            found[prompt, sample] for sample in range(_MOST_REPEATED) if (prompt, sample) in found
        ]
        lengths |= {str(i): of} if of else {}
    about = {
        "about": f"each with the length of {MODEL_NAME}'s own answer at temperature {TEMPERATURE}",
        "unit": f"tokens, the end token counted; what has {CAP} was cut there",
        "command": f"python -m bench.real_model.answers --prompts {number} --lengths {path}",
        "num_prompts": number,
        "prompts_hash": prompts_hash(asked),
        "lengths": lengths,
    }
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(of)}" for key, of in about.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _is_recorded(age_tokens: int, number: int) -> bool:
    """At the ages at which a server records (patches/probe/recorder.py)."""
    return (
        is_due(age_tokens)
        or age_tokens % DUE_INTERVAL_TOKENS == number * 7919 % DUE_INTERVAL_TOKENS
    )


def _write_states(folder: Path, made: Answered, answer: Answer) -> None:
    layers, size = answer.hidden[0][1].shape
    rows = [(made.arrival, age, states) for age, states in answer.hidden]
    with open(folder / f"{SESSION}-000000{ROWS}", "ab", opener=own_file) as file:
        file.write(np.array(rows, row_type(layers, size)).tobytes())


def main() -> int:
    parser = argparse.ArgumentParser(description="Answers of a real language model.")
    parser.add_argument(
        "--prompts", type=int, default=NUM_PROMPTS, help="generated ones (%(default)s)"
    )
    parser.add_argument("--repeated", action="store_true", help="more answers, by Zipf's law")
    parser.add_argument("--data", type=Path, help="folder with datasets, whose prompts come too")
    parser.add_argument("--states", action="store_true", help="keep hidden states of all layers")
    parser.add_argument("--slots", type=int, default=48, help="answered at a time (%(default)s)")
    parser.add_argument("--lengths", type=Path, help="write the lengths here, and answer nothing")
    args = parser.parse_args()
    if args.lengths:
        write_lengths(args.lengths, args.prompts)
        return 0
    torch.set_num_threads(1)
    asked = prompts(args.prompts)
    wanted = [(*each, 0) for each in asked]
    if args.data:
        wanted += [(*each, 0) for each in dataset_prompts(args.data)]
    if args.repeated:
        wanted += repeated(asked)
    make(wanted, args.slots, args.states)
    return 0


if __name__ == "__main__":
    sys.exit(main())
