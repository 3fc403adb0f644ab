"""A trace of somebody's own, by blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.workloads.mooncake import BLOCK_TOKENS, read_mooncake, requests_of_trace
from bench.workloads.prompts import WorkloadError

ROWS: list[dict[str, object]] = [
    {"timestamp": 2000, "input_length": 1000, "output_length": 40, "hash_ids": [7, 8]},
    {"timestamp": 500, "input_length": 1400, "output_length": 9, "hash_ids": [7, 9]},
    {
        "timestamp": 9000, "input_length": 600, "output_length": 1, "hash_ids": [7, 8],
        "session_id": "chat",
    },
]  # fmt: skip


def written(folder: Path, rows: list[dict[str, object]]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_prompts_share_the_blocks_they_begin_with(tmp_path: Path) -> None:
    trace = read_mooncake(written(tmp_path, ROWS))
    first, second, third = requests_of_trace(trace, factor=1.0, speed=2.0, foreseen=None)
    assert [each.arrival_s for each in (first, second, third)] == [0.0, 0.75, 4.25]
    assert second.spans == ((7, 0, BLOCK_TOKENS), (8, 0, 1000 - BLOCK_TOKENS))
    assert third.spans == ((7, 0, BLOCK_TOKENS), (8, 0, 600 - BLOCK_TOKENS))
    # Its blocks are shorter than its prompt: the rest is its own.
    assert first.spans[:2] == ((7, 0, BLOCK_TOKENS), (9, 0, BLOCK_TOKENS))
    assert sum(end for _, _, end in first.spans) == 1400
    assert (third.hints.session, third.output_tokens) == ("chat", 1)
    assert first.hints.session != second.hints.session


def test_all_token_counts_are_divided_alike(tmp_path: Path) -> None:
    trace = read_mooncake(written(tmp_path, ROWS))
    requests = requests_of_trace(trace, factor=4.0, speed=1.0, foreseen=None, cap_tokens=5)
    assert [each.input_tokens for each in requests] == [350, 250, 150]
    assert [each.output_tokens for each in requests] == [2, 5, 1]
    assert requests[1].spans == ((7, 0, BLOCK_TOKENS // 4), (8, 0, 250 - BLOCK_TOKENS // 4))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"timestamp": -1}, "out of range"),
        ({"timestamp": "NaN"}, "out of range"),
        ({"input_length": 0}, "out of range"),
        ({"hash_ids": 3}, "no request of a Mooncake trace"),
        ({"hash_ids": ["x"]}, "no request of a Mooncake trace"),
        ({"output_length": None}, "no request of a Mooncake trace"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path: Path, broken: dict[str, object], said: str) -> None:
    file = written(tmp_path, [ROWS[0], {**ROWS[1], **broken}])
    with pytest.raises(WorkloadError, match=rf"trace\.jsonl:2.*{said}"):
        read_mooncake(file)


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="holds no requests"):
        read_mooncake(written(tmp_path, []))
    with pytest.raises(WorkloadError, match="no file"):
        read_mooncake(tmp_path / "other.jsonl")
