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


def read(
    dataset: Path | str, counts_tokens: bool = True, **filters: str
) -> tuple[list[Observation], dict[str, int]]:
    """Return observations, and the number of omitted rows by reason."""
    tokenizer = object() if counts_tokens else None
    found = Observations([str(dataset)], ReadOptions(filters=filters), tokenizer)
    rows = list(found)
    return rows, dict(found.sources[0].counts.left_out)


NO_LENGTHS = (None, -3, 0, 1.5, "many", True, 10**400)
NO_NUMBERS = (2**31, 1e30, -5, 1.5, "x", True, math.inf)


@pytest.mark.parametrize(
    "bad",
    [
        '{"prompt": "p", ', '{"a":' * 100_000, [1, 2], None,
        {"id": 5, "output_tokens": 3}, PLAIN | {"prompt": 5}, PLAIN | {"prompt": ""},
        {"prompt": "p"}, {"prompt": "p", "output": {"x": 1}}, {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "hello"}]}, {"conversations": ["hi", "hello"]},
        *(PLAIN | {"output_tokens": length} for length in NO_LENGTHS),
        *(PLAIN | {"prompt_tokens": number} for number in NO_NUMBERS),
    ],
)  # fmt: skip
def test_a_malformed_row_is_left_out_and_named(tmp_path: Path, bad: Any) -> None:
    path = lines(tmp_path / "d.jsonl", PLAIN, bad, PLAIN)
    found = Observations([str(path)], None, object())
    assert len(list(found)) == 2
    counts = found.sources[0].counts
    assert counts.left_out.total() == 1
    assert next(iter(counts.first.values())).startswith(f"{path}:2: ")


def test_filters_take_equal_values_only(tmp_path: Path) -> None:
    of_a, of_b = ({"model": model, "greedy": False, "n": 1} for model in "ab")
    path = lines(tmp_path / "d.jsonl", PLAIN | of_a, PLAIN | of_b, PLAIN)
    rows, left_out = read(path, model="a", greedy="false", n="1")
    assert (len(rows), left_out) == (1, {})


def test_rows_give_what_they_say(tmp_path: Path) -> None:
    caps = [PLAIN | {"cap": cap} for cap in (4, 5, 6, 0, None)] + [PLAIN | {"is_cut": True}]
    long, texts = PLAIN | {"prompt": "a" * 50_000}, {"prompt": "p", "output": "o"}
    rows, left_out = read(lines(tmp_path / "d.jsonl", *caps, long, texts), counts_tokens=False)
    assert [row.censored for row in rows] == [True, True, False, False, False, True, False]
    assert (len(rows[-1].prompt) < 5_000, rows[-1].prompt_chars) == (True, 50_000)
    assert left_out == {"without an answer length": 1}  # and no tokenizer


def test_nothing_usable_says_why(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", {"frage": "x", "antwort": "y"})
    with pytest.raises(DatasetError, match="fields seen: antwort, frage"):
        read(path)
    with pytest.raises(DatasetError, match=r"fields seen: output_tokens, prompt.*--filter left"):
        read(lines(tmp_path / "e.jsonl", PLAIN), frage="z")
    (tmp_path / "folder").mkdir()
    both = [str(lines(tmp_path / name, PLAIN | {"prompt": 5})) for name in "xy"]
    with pytest.raises(DatasetError, match=r"left out: 2 .*the first: \S*/x:1"):
        list(Observations(both))
    with pytest.raises(DatasetError, match="there is no file in"):
        read(tmp_path / "folder")


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
