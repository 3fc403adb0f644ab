"""Prompts and lengths of answers out of data sets, as warm takes them."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from predictor_store.data.observations import Observation, Observations
from predictor_store.logs.errors import DatasetError
from predictor_store.logs.reader import ReadOptions
from tests.predictor_store.samples import lines

PLAIN = {"prompt": "p", "output_tokens": 5}


class Words:
    """A tokenizer that decodes each id as a word."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"word{number}" for number in ids)


def read(
    dataset: Path | str, counts_tokens: bool = True, **filters: str
) -> tuple[list[Observation], dict[str, int]]:
    """Observations, and the number of rows left out by reason."""
    options = ReadOptions(filters=filters)
    found = Observations([str(dataset)], options, Words() if counts_tokens else None)
    rows = list(found)
    return rows, dict(found.sources[0].counts.left_out)


def said(*turns: str, **names: str) -> list[dict[str, str]]:
    """Turns of a user and a machine, each as `who: words`; names: of the two fields."""
    who, words = names.get("who", "role"), names.get("words", "content")
    return [dict(zip((who, words), turn.split(": "), strict=True)) for turn in turns]


SHAREGPT = {"who": "from", "words": "value"}
PARTS = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "x"}},
         {"type": "text", "text": "this"}]  # fmt: skip
# A row, its prompt, the text of its answer, and the tokens of its answer.
FORMS: dict[str, tuple[dict[str, Any], str, str | None, int]] = {
    "record": ({"prompt": "p", "output_tokens": 7}, "p", None, 7),
    "record with output": ({"prompt": "p", "output_tokens": 7, "output": "o"}, "p", None, 7),
    "alpaca": ({"instruction": "do", "input": "this", "output": "done"}, "do\n\nthis", "done", 0),
    "alpaca, no input": ({"instruction": "do", "input": "", "output": "done"}, "do", "done", 0),
    "question": ({"question": "q", "answer": "a"}, "q", "a", 0),
    "sharegpt": ({"id": "x", "conversations": said(
        "system: be kind", "human: hi", "gpt: hello", "human: again", "gpt: what", **SHAREGPT)},
        "hi", "hello", 0),
    "sharegpt that begins with an answer": ({"conversations": said(
        "gpt: left over", "human: hi", "gpt: hello", **SHAREGPT)}, "hi", "hello", 0),
    "openai": ({"messages": said("system: be kind", "user: hi", "assistant: hello")},
               "hi", "hello", 0),
    "openai parts": ({"messages": [
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}]},
        "what is\nthis", "a cat", 0),
    "prompt as messages": ({"prompt": said("user: hi"), "completion_tokens": 3}, "hi", None, 3),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "prompt", "output", "num_tokens"), FORMS.values(), ids=FORMS)
def test_every_form(
    tmp_path: Path, raw: dict[str, Any], prompt: str, output: str | None, num_tokens: int
) -> None:
    rows, left_out = read(lines(tmp_path / "d.jsonl", raw, raw))
    assert [(r.prompt, r.output, r.output_tokens) for r in rows] == [
        (prompt, output, num_tokens)
    ] * 2
    assert not left_out


MALFORMED: dict[str, Any] = {
    "not JSON": '{"prompt": "p", ',
    "no object": [1, 2],
    "a number": 5,
    "null": None,
    "no prompt": {"id": 5, "output_tokens": 3},
    "prompt no text": {"prompt": 5, "output_tokens": 3},
    "empty prompt": {"prompt": "", "output_tokens": 3},
    "no length": {"prompt": "p"},
    "null length": {"prompt": "p", "output_tokens": None},
    "negative": {"prompt": "p", "output_tokens": -3},
    "zero": {"prompt": "p", "output_tokens": 0},
    "fraction": {"prompt": "p", "output_tokens": 1.5},
    "a word": {"prompt": "p", "output_tokens": "many"},
    "true": {"prompt": "p", "output_tokens": True},
    "huge": {"prompt": "p", "output_tokens": 10**400},
    "output no text": {"prompt": "p", "output": {"x": 1}},
    "only the machine speaks": {"conversations": [{"from": "gpt", "value": "hello"}]},
    "conversation of words": {"conversations": ["hi", "hello"]},
    "empty conversation": {"conversations": []},
    "deep": '{"a":' * 100_000,
}


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_row_is_left_out_and_named(tmp_path: Path, bad: Any) -> None:
    path = lines(tmp_path / "d.jsonl", PLAIN, bad, PLAIN)
    found = Observations([str(path)], None, Words())
    assert len(list(found)) == 2
    (source,) = found.sources
    assert source.counts.left_out.total() == 1
    (first,) = source.counts.first.values()
    assert first.startswith(f"{path}:2: ")


@pytest.mark.parametrize("number", [2**31, 2**63, 1e30, -5, 1.5, "x", True, math.inf])
def test_a_number_that_is_none_costs_its_row(number: object, tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", PLAIN, PLAIN | {"prompt_tokens": number})
    rows, left_out = read(path)
    assert (len(rows), list(left_out.values())) == (1, [1])


def test_long_prompts_are_held_in_part(tmp_path: Path) -> None:
    (row,), _ = read(lines(tmp_path / "d.jsonl", PLAIN | {"prompt": "a" * 50_000}))
    assert len(row.prompt) < 5_000
    assert row.prompt_chars == 50_000


def test_filters_take_equal_values_only(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "d.jsonl",
        PLAIN | {"model": "a", "greedy": False, "n": 1},
        PLAIN | {"model": "b", "greedy": False, "n": 1},
        PLAIN,
    )
    rows, left_out = read(path, model="a", greedy="false", n="1")
    assert (len(rows), left_out) == (1, {})


def test_an_answer_at_its_cap_is_censored(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", *[PLAIN | {"cap": cap} for cap in (4, 5, 6, None)], PLAIN)
    rows, _ = read(path)
    assert [row.censored for row in rows] == [True, True, False, False, False]


def test_without_a_tokenizer_output_alone_is_not_enough(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", PLAIN, {"prompt": "p", "output": "o"})
    rows, left_out = read(path, counts_tokens=False)
    assert (len(rows), left_out) == (1, {"without an answer length": 1})
    with pytest.raises(DatasetError, match="--tokenizer counts its text"):
        read(lines(tmp_path / "e.jsonl", {"prompt": "p", "output": "o"}), counts_tokens=False)


def test_nothing_usable_says_which_fields_were_seen(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"frage": "x", "antwort": "y"})
    with pytest.raises(DatasetError, match=r"fields seen: antwort, frage.*sage-sched formats"):
        read(path)
    with pytest.raises(DatasetError, match=r"fields seen: output_tokens, prompt.*--filter left"):
        read(lines(tmp_path / "e.jsonl", PLAIN), frage="z")
    with pytest.raises(DatasetError, match="there is no file"):
        read(tmp_path / "missing.jsonl")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DatasetError, match="there is no file in"):
        read(tmp_path / "folder")


def test_the_record_form_of_the_optional_data(shared_data: Path) -> None:
    rows, left_out = read(
        shared_data / "alpaca_eval.jsonl.gz", counts_tokens=False, model="Meta-Llama-3-8B-Instruct"
    )
    assert len(rows) == 805
    assert not left_out
    assert all(row.input_tokens > 0 for row in rows)


def test_a_large_file_takes_no_more_memory_than_a_small_one(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "word " * 400}], "usage": {"output_tokens": 5}}

    def peak_bytes(num_rows: int) -> int:
        path = lines(tmp_path / "d.jsonl", *[row] * num_rows)
        tracemalloc.start()
        for _ in Observations([str(path)]):
            pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    assert peak_bytes(4_000) < peak_bytes(400) + 200_000
