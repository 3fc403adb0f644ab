from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from predictor_store.data import files
from predictor_store.data.datasets import Observation, Reader
from predictor_store.data.files import DatasetError
from predictor_store.data.server_records import read_line
from tests.predictor_store.samples import lines

PLAIN = {"prompt": "p", "output_tokens": 5}


class Words:
    """A tokenizer of so many words."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"word{number}" for number in ids)


def read(
    dataset: Path | str, counts_tokens: bool = True, **filters: str
) -> tuple[list[Observation], Reader]:
    reader = Reader(str(dataset), filters, Words() if counts_tokens else None)
    return list(reader), reader


FORMS: dict[str, tuple[dict[str, Any], str, str | None, int | None]] = {
    "record": ({"prompt": "p", "output_tokens": 7}, "p", None, 7),
    "record with output": ({"prompt": "p", "output_tokens": 7, "output": "o"}, "p", "o", 7),
    "alpaca": (
        {"instruction": "do", "input": "this", "output": "done"},
        "do\n\nthis",
        "done",
        None,
    ),
    "alpaca, no input": ({"instruction": "do", "input": "", "output": "done"}, "do", "done", None),
    "question": ({"question": "q", "answer": "a"}, "q", "a", None),
    "sharegpt": (
        {
            "id": "x",
            "conversations": [
                {"from": "system", "value": "be kind"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "hello"},
                {"from": "human", "value": "again"},
                {"from": "gpt", "value": "what"},
            ],
        },
        "hi",
        "hello",
        None,
    ),
    "sharegpt that begins with an answer": (
        {
            "conversations": [
                {"from": "gpt", "value": "left over"},
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": "hello"},
            ]
        },
        "hi",
        "hello",
        None,
    ),
    "openai": (
        {
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ]
        },
        "hi",
        "hello",
        None,
    ),
    "openai parts": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "what is"},
                        {"type": "image_url", "image_url": {"url": "x"}},
                        {"type": "text", "text": "this"},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
            ]
        },
        "what is\nthis",
        "a cat",
        None,
    ),
    "prompt as messages": (
        {"prompt": [{"role": "user", "content": "hi"}], "completion_tokens": 3},
        "hi",
        None,
        3,
    ),
}


def as_json_lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return lines(folder / "data.jsonl", *rows)


def as_json_array(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.json"
    path.write_text(json.dumps(rows, indent=2))
    return path


def as_gzip(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.jsonl.gz"
    path.write_bytes(gzip.compress(as_json_lines(folder, rows).read_bytes()))
    return path


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


WRITERS = [as_json_lines, as_json_array, as_gzip, as_parquet]
Writer = Callable[[Path, list[dict[str, Any]]], Path]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_in_every_file(
    tmp_path: Path, write: Writer, form: tuple[dict[str, Any], str, str | None, int | None]
) -> None:
    raw, prompt, output, output_tokens = form
    rows, reader = read(write(tmp_path, [raw, raw]))
    assert [(r.prompt, r.output, r.output_tokens) for r in rows] == [
        (prompt, output, output_tokens or 0)
    ] * 2
    assert (reader.num_read, reader.num_malformed) == (2, 0)


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
def test_a_malformed_row_is_counted_and_named(tmp_path: Path, bad: Any) -> None:
    path = lines(tmp_path / "d.jsonl", PLAIN, bad, PLAIN)
    rows, reader = read(path)
    assert len(rows) == 2
    assert reader.num_malformed == 1
    assert reader.malformed[0][0] == f"{path}:2"


def test_rows_of_an_array_are_named_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(
        '[\n  {"prompt": "p", "output_tokens": 5},\n\n  7,\n  {"prompt": "q"},\n  [1]\n]'
    )
    rows, reader = read(path)
    assert len(rows) == 1
    assert [place for place, _ in reader.malformed] == [f"{path}: row {n}" for n in (2, 3, 4)]


@pytest.mark.parametrize(
    "text",
    [
        '[{"prompt": "p", "output_tokens": 5},\n{"prompt": "q", ', "[1 2]", "[1,]", "[,1]", "[1",
        "[1][2]", "[1] 2", "[" * 100_000, "[,]",
    ],
)  # fmt: skip
def test_a_broken_array_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match="no JSON array"):
        read(path)


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_an_array_is_read_as_it_comes(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_ARRAY_CHARS", piece)
    values = [12345, "a, ] [", {"a": [1, {}]}, 1.5e3, [], None, '\\"]']
    (tmp_path / "d.json").write_text("\n " + json.dumps(values) + "\n \n")
    assert [row for _, row in files.raw_rows(str(tmp_path / "d.json"))] == values
    (tmp_path / "d.json").write_text(" [ \n] ")
    assert list(files.raw_rows(str(tmp_path / "d.json"))) == []


def test_a_line_that_never_ends_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_LINE_CHARS", 1000)
    monkeypatch.setattr(files, "_ARRAY_CHARS", 100)
    monkeypatch.setattr("predictor_store.data.server_records._MOST_STRAY_CHARS", 1000)
    long = json.dumps({"prompt": "p" * 100_000, "output_tokens": 5})
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(PLAIN)}\n{long}\n{json.dumps(PLAIN)}\n".encode()))
    longest = 0

    def seen(line: str, tokenizer: Any) -> list[Any]:
        nonlocal longest
        longest = max(longest, len(line))
        return read_line(line, tokenizer)

    monkeypatch.setattr("predictor_store.data.server_records.read_line", seen)
    rows, reader = read(path)
    assert (len(rows), longest) == (2, 1000)
    assert reader.num_malformed == len(long) // 1000 + 1
    (tmp_path / "d.json").write_text(f"[{long}]")
    with pytest.raises(DatasetError, match="no JSON array"):
        read(tmp_path / "d.json")


@pytest.mark.parametrize("number", [2**31, 2**63, 10**400, 1e30, -5, 1.5, "x", True, math.inf])
def test_what_is_no_number_of_tokens_is_not_known(number: object, tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", PLAIN | {"prompt_tokens": number, "cap": number})
    ((row,), _) = read(path)
    assert (row.input_tokens, row.censored) == (0, False)


def test_a_truncated_gzip_gives_what_comes_before(tmp_path: Path) -> None:
    rows = [{"prompt": f"prompt {i * 7919}", "output_tokens": 5} for i in range(5000)]
    path = as_gzip(tmp_path, rows)
    path.write_bytes(path.read_bytes()[:-2000])
    found, reader = read(path)
    assert 0 < len(found) < 5000
    assert reader.num_malformed == 1
    assert reader.malformed[0][0] == f"{path}:{len(found) + 1}"


def test_parquet_with_gaps_and_a_damaged_one(tmp_path: Path) -> None:
    path = as_parquet(
        tmp_path,
        [
            {"prompt": "p", "output_tokens": 5.0},
            {"prompt": None, "output_tokens": 5.0},
            {"prompt": "q", "output_tokens": float("nan")},
        ],
    )
    rows, reader = read(path)
    assert [row.output_tokens for row in rows] == [5]
    assert [place for place, _ in reader.malformed] == [f"{path}:2", f"{path}:3"]
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DatasetError, match=f"cannot read {damaged}"):
        read(damaged)


def test_bytes_that_are_no_utf8_spoil_their_row_at_most(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    good = json.dumps(PLAIN).encode()
    path.write_bytes(good + b"\n\xff\xfe\n" + good.replace(b'"p"', b'"\xff"') + b"\n")
    rows, reader = read(path)
    assert len(rows) == 2
    assert reader.malformed[0][0] == f"{path}:2"


def test_filters_take_equal_values_only(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "d.jsonl",
        PLAIN | {"model": "a", "greedy": False, "n": 1},
        PLAIN | {"model": "b", "greedy": False, "n": 1},
        PLAIN,
    )
    rows, reader = read(path, model="a", greedy="false", n="1")
    assert len(rows) == 1
    assert (reader.num_filtered, reader.num_malformed) == (2, 0)


def test_an_answer_at_its_cap_is_censored(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", *[PLAIN | {"cap": cap} for cap in (4, 5, 6, None)], PLAIN)
    rows, _ = read(path)
    assert [row.censored for row in rows] == [True, True, False, False, False]


def test_without_a_tokenizer_output_alone_is_not_enough(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", PLAIN, {"prompt": "p", "output": "o"})
    rows, reader = read(path, counts_tokens=False)
    assert len(rows) == 1
    assert "--tokenizer" in reader.malformed[0][1]


def test_nothing_usable_says_which_fields_were_seen(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"frage": "x", "antwort": "y"})
    with pytest.raises(DatasetError, match=r"fields seen: antwort, frage.*Call its fields prompt"):
        read(path)
    with pytest.raises(DatasetError, match=r"--filter left out 1 rows"):
        read(path, frage="z")


def test_no_file_and_no_log_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="there is no file"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(DatasetError, match="there is no request log in"):
        read(tmp_path)


def test_the_record_form_of_the_optional_data(shared_data: Path) -> None:
    rows, reader = read(
        shared_data / "alpaca_eval.jsonl.gz",
        counts_tokens=False,
        model="Meta-Llama-3-8B-Instruct",
    )
    assert len(rows) == 805
    assert reader.num_malformed == 0
    assert all(row.input_tokens > 0 for row in rows)
