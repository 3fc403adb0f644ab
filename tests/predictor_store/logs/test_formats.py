"""The same requests out of every format, and the special cases of some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predictor_store.logs.errors import DatasetError
from predictor_store.logs.reader import LogReader, ReadOptions, Source
from predictor_store.logs.registry import FORMATS, format_of
from predictor_store.logs.request import LoggedRequest
from predictor_store.logs.rows import raw_rows
from predictor_store.logs.summary import lines_of
from tests.predictor_store.logs.variants import (
    ANSWER,
    NO_TIMES,
    VARIANTS,
    aiperf,
    date,
    dynamo,
    langfuse,
    made,
    span,
    value,
)

ASKED = made()


def read(
    folder: Path, text: str, options: ReadOptions | None = None
) -> tuple[list[LoggedRequest], Source, str]:
    """The requests of a file, and the first lines of output."""
    path = folder / "log"
    path.write_text(text, encoding="utf-8")
    reader = LogReader([str(path)], options)
    (source,) = reader.sources()
    found = [request for _, request in source]
    return found, source, "\n".join(lines_of(reader, [source]))


def rows(folder: Path, *found: Any) -> tuple[list[LoggedRequest], Source, str]:
    return read(folder, "".join(f"{json.dumps(row)}\n" for row in found))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_requests_out_of_every_variant(tmp_path: Path, name: str) -> None:
    format_, write, has, resolution_s = VARIANTS[name]
    found, source, _ = read(tmp_path, write(ASKED))
    assert source.format.name == format_
    assert not source.counts.left_out
    assert len(found) == len(ASKED)
    if "-" in has:
        assert {each.output_tokens for each in found} == {None}
        assert {each.output for each in found} == {"So."}
    else:
        lengths = [(each.input_tokens, each.output_tokens) for each in found]
        assert lengths == [(a.inputs, a.outputs) for a in ASKED]
    scale = source.context.clock.scale()
    if resolution_s == NO_TIMES:
        assert {each.arrival for each in found} == {None}
    else:
        at_s = [each.arrival * scale for each in found if each.arrival is not None]
        assert [t - at_s[0] for t in at_s] == pytest.approx(
            [a.at_s for a in ASKED], abs=1.01 * resolution_s
        )
    assert [each.prompt for each in found] == [a.text if "p" in has else "" for a in ASKED]
    assert {each.cap_tokens for each in found} <= (
        {800} if "c" in has else {None, *lengths_of(found)}
    )
    assert all(each.session for each in found) == ("s" in has)
    ttlts = [ttlt_s(each, scale) for each in found]
    assert ttlts == ([pytest.approx(a.ttlt_s, abs=2e-3) for a in ASKED] if "t" in has else ttlts)
    assert (None in ttlts) == ("t" not in has)


def lengths_of(found: list[LoggedRequest]) -> set[int | None]:
    """bench_serving names the length that it wants as the cap."""
    return {each.output_tokens for each in found}


def ttlt_s(request: LoggedRequest, scale: float) -> float | None:
    if request.ttlt_s is None and request.end is not None and request.arrival is not None:
        return (request.end - request.arrival) * scale
    return request.ttlt_s


@pytest.mark.parametrize("format_", FORMATS, ids=lambda each: each.name)
def test_the_example_of_each_format_is_of_that_format(tmp_path: Path, format_: Any) -> None:
    values = "" if format_.example.startswith(("{", "[")) else "1," * format_.example.count(",")
    (tmp_path / "log").write_text(f"{format_.example}\n{values}")
    row = next(row for _, row in raw_rows(str(tmp_path / "log")))
    assert format_of(row) is format_


A = ASKED[1]
FAILED = {
    "aiperf": aiperf(A, output_sequence_length=value(3)) | {"error": {"code": 499}},
    "litellm": {"startTime": 1.0, "call_type": "completion", "completion_tokens": 3,
                "status": "failure"},
    "langfuse": langfuse(A, level="ERROR"),
    "otel": span(A) | {"status": {"code": 2}},
    "openai-batch": {"custom_id": "r", "response": {"status_code": 500, "body": {}}},
    "table": {"t": 1, "input_tokens": 3, "output_tokens": 0, "status": 503},
}  # fmt: skip
OTHER = {
    "aiperf": {"metadata": {"request_start_ns": 1, "benchmark_phase": "warmup"}, "metrics": {}},
    "litellm": {"startTime": 1.0, "call_type": "aembedding", "completion_tokens": 0},
    "langfuse": langfuse(A, type="SPAN"),
    "otel": span(A) | {"attributes": [{"key": "http.method", "value": {"stringValue": "GET"}}]},
    "otel, around a call": span(A)
    | {"attributes": {"ai.operationId": "ai.generateText", "ai.usage.completionTokens": 5}},
    "dynamo": {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}},
    "sglang": {"event": "request.received", "timestamp": date(1.0), "obj": {}},
}
SOUND = {
    "aiperf": aiperf(A, output_sequence_length=value(A.outputs)), "langfuse": langfuse(A),
    "otel": span(A), "dynamo": dynamo(A),
    "table": {"t": 1, "input_tokens": 3, "output_tokens": 5, "status": 200},
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_requests_that_failed_are_left_out_and_counted(tmp_path: Path, name: str) -> None:
    sound = [SOUND[name]] if name in SOUND else []
    found, source, said = rows(tmp_path, FAILED[name], FAILED[name], *sound)
    assert source.format.name == name
    assert len(found) == len(sound)
    assert "left out: 2 that failed; the first: " in said


@pytest.mark.parametrize("name", OTHER)
def test_rows_that_are_no_requests_count_apart(tmp_path: Path, name: str) -> None:
    sound = [SOUND[name]] * 2 if name in SOUND else []
    found, source, said = rows(tmp_path, *sound, OTHER[name])
    assert source.format.name == name.partition(",")[0]
    assert (len(found), source.counts.left_out.total()) == (len(sound), 0)
    assert "; 1 rows are no requests" in said


def test_a_batch_takes_its_prompts_from_the_input_file(tmp_path: Path) -> None:
    asked = VARIANTS["OpenAI's batch"].write(ASKED)
    (tmp_path / "a_output.jsonl").write_text(asked)
    bodies = [
        {"custom_id": f"r{a.number}", "body": {"messages": a.messages, "max_tokens": 800}}
        for a in ASKED
    ]
    (tmp_path / "b_input.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in bodies))
    sources = LogReader([str(tmp_path)]).sources()
    found = [request for source in sources for _, request in source]
    assert [each.prompt for each in found] == [a.text for a in ASKED]
    assert {each.cap_tokens for each in found} == {800}


def test_usage_of_several_choices_is_of_all_of_them(tmp_path: Path) -> None:
    choices = [{"message": ANSWER}] * 4
    (found,), _, _ = rows(tmp_path, {"created": 1, "choices": choices, "usage": A.usage})
    assert found.output_tokens == round(A.outputs / 4)


def test_the_last_answer_of_a_chat_with_usage_and_the_first_of_a_data_set(tmp_path: Path) -> None:
    chat = [*A.messages, ANSWER, {"role": "user", "content": "And?"}, {"role": "tool"}]
    with_usage, without = (
        rows(tmp_path, {"messages": [*chat, {"role": "assistant", "content": "Thus."}], **more})[0]
        for more in ({"usage": A.usage}, {})
    )
    assert (with_usage[0].prompt, with_usage[0].output_tokens) == ("And?", A.outputs)
    assert (without[0].prompt, without[0].output) == (A.text, "So.")


def test_a_trace_with_other_blocks_has_them(tmp_path: Path) -> None:
    trace = [
        {"timestamp": t, "input_length": 305, "output_length": 5, "hash_ids": [*range(20)]}
        for t in range(3)
    ]
    assert {each.block_tokens for each in rows(tmp_path, *trace)[0]} == {16}


def test_a_session_goes_on_after_a_pause(tmp_path: Path) -> None:
    first = {"session_id": "s", "timestamp": 5, "input_length": 3, "output_length": 5}
    later = {"session_id": "s", "delay": 1500, "input_length": 3, "output_length": 5}
    one, other = rows(tmp_path, first, later)[0]
    assert (one.session, other.session, other.arrival, other.pause_s) == ("s", "s", None, 1.5)


def test_a_format_can_be_named(tmp_path: Path) -> None:
    row = {"timestamp": 1, "input_length": 3, "output_length": 5}
    found, source, _ = read(tmp_path, json.dumps(row), ReadOptions(format="table"))
    assert (source.format.name, found[0].output_tokens) == ("table", 5)


def test_files_of_a_folder_that_are_no_logs_are_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Logs\n")
    (tmp_path / ".hidden").write_text("{}")
    (tmp_path / "a.csv").write_text("t,input,output\n1,2,3\n")
    reader = LogReader([str(tmp_path)])
    sources = reader.sources()
    assert [Path(source.path).name for source in sources] == ["a.csv"]
    assert "README.md is in no known format" in "\n".join(lines_of(reader, sources))
    (tmp_path / "a.csv").unlink()
    with pytest.raises(DatasetError, match="no log found"):
        LogReader([str(tmp_path)]).sources()


def test_recognition_is_explained(tmp_path: Path) -> None:
    _, _, said = read(tmp_path, VARIANTS["Azure, 2023"].write(ASKED) + "x,1,2\ny,1,2\n")
    assert ": azure, by arrival TIMESTAMP, input ContextTokens, output GeneratedTokens" in said
    assert "times: dates without a zone, read as UTC" in said
    assert "left out: 2 with a time that cannot be read; the first: " in said
