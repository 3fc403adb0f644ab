"""The same requests out of every format, and the special cases of some."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor_store.logs.errors import DatasetError
from predictor_store.logs.reader import LogReader, ReadOptions, Source
from predictor_store.logs.registry import FORMATS, format_of
from predictor_store.logs.request import LoggedRequest
from predictor_store.logs.rows import raw_rows
from predictor_store.logs.summary import lines_of
from tests.predictor_store.logs.variants import ANSWER, CALL, VARIANTS, made
from tests.predictor_store.samples import lines

ASKED = made()
A = ASKED[1]


def read(path: Path, options: ReadOptions | None = None) -> tuple[list[LoggedRequest], Source, str]:
    """The requests of a file, and the first lines of output."""
    reader = LogReader([str(path)], options)
    (source,) = reader.sources()
    found = [request for _, request in source]
    return found, source, "\n".join(lines_of(reader, [source]))


def log(folder: Path, text: str) -> Path:
    (folder / "log").write_text(text, encoding="utf-8")
    return folder / "log"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_requests_out_of_every_variant(tmp_path: Path, name: str) -> None:
    format_, _, has, resolution_s, *_ = variant = VARIANTS[name]
    found, source, _ = read(log(tmp_path, variant.write(ASKED)))
    assert (source.format.name, len(found), source.counts.left_out.total()) == (format_, 60, 0)
    if "-" in has:
        assert {(each.output_tokens, each.output) for each in found} == {(None, "So.")}
    else:
        lengths = [(each.input_tokens, each.output_tokens) for each in found]
        assert lengths == [(a.inputs, a.outputs) for a in ASKED]
    scale = source.context.clock.scale()
    at_s = [each.arrival * scale for each in found if each.arrival is not None]
    if resolution_s == math.inf:
        assert not at_s
    else:
        expected_s = pytest.approx([a.at_s for a in ASKED], abs=1.01 * resolution_s)
        assert [t - at_s[0] for t in at_s] == expected_s
    assert [each.prompt for each in found] == [a.text if "p" in has else "" for a in ASKED]
    # bench_serving names the length that it wants as the cap.
    own_caps = {None, *(each.output_tokens for each in found)}
    assert {each.cap_tokens for each in found} <= ({800} if "c" in has else own_caps)
    assert all(each.session for each in found) == ("s" in has)
    ttlts_s = [ttlt_s(each, scale) for each in found]
    assert None in ttlts_s or ttlts_s == pytest.approx([a.ttlt_s for a in ASKED], abs=2e-3)
    assert (None in ttlts_s) == ("t" not in has)


def ttlt_s(request: LoggedRequest, scale: float) -> float | None:
    if request.ttlt_s is None and request.end is not None and request.arrival is not None:
        return (request.end - request.arrival) * scale
    return request.ttlt_s


def damaged(text: str, chance: random.Random) -> str:
    """Return the text with pieces that are lost, doubled, moved or overwritten."""
    for _ in range(chance.randint(1, 8)):
        begin, other = chance.randrange(len(text)), chance.randrange(len(text))
        piece = text[begin : begin + chance.choice([1, 1, 5, 200])]
        junk = chance.choice(["", piece * 2, '"', "-", "9" * 30, "null", "[", "}", "\0", "\n"])
        text = text[:begin] + junk + text[begin + len(piece) :]
        if chance.random() < 0.2:
            text = text[:other] + piece + text[other:]
    return text[: chance.randint(1, len(text))] if chance.random() < 0.3 else text


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_file_is_read_in_part_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int
) -> None:
    text = damaged(VARIANTS[name].write(ASKED), random.Random(seed))
    try:
        found, source, _ = read(log(tmp_path_factory.mktemp("damaged"), text))
    except DatasetError:
        return
    for each in found:
        for number in (each.input_tokens, each.output_tokens, each.cap_tokens):
            assert number is None or 0 <= number < 2**31
        assert each.arrival is None or math.isfinite(each.arrival)
        assert isinstance(each.prompt, str)
    assert source.counts.read > 0


@pytest.mark.parametrize("format_", FORMATS, ids=lambda each: each.name)
def test_the_example_of_each_format_is_of_that_format(tmp_path: Path, format_: Any) -> None:
    values = "" if format_.example.startswith(("{", "[")) else "1," * format_.example.count(",")
    path = log(tmp_path, f"{format_.example}\n{values}")
    row = next(row for _, row in raw_rows(str(path)))
    assert format_of(row) is format_


SGLANG, LANGFUSE, OTLP = "SGLang's request log", "Langfuse", "OTLP"
BATCH, CHAT, TABLE = "OpenAI's batch", "messages with usage", "an array of tables' rows"


def row(variant: str, **fields: Any) -> dict[str, Any]:
    return json.loads(VARIANTS[variant].row_of(A)) | fields


LEFT_OUT, OTHER = (2, 0), (0, 2)
MARKED = {"key": "llm.usage.prompt_tokens", "value": {"intValue": 3}}
AROUND = {"ai.operationId": "ai.generateText", "ai.usage.completionTokens": 5}
EMBEDDED = {"gen_ai.operation.name": "embeddings", "gen_ai.usage.output_tokens": 0}


@pytest.mark.parametrize(
    ("variant", "fields", "counts"),
    [
        (SGLANG, {"event": "request.received"}, OTHER),
        (SGLANG, {"obj": {"sampling_params": {"max_new_tokens": 10**30}}}, LEFT_OUT),
        (SGLANG, {"obj": 5}, LEFT_OUT),
        ("aiperf", {"error": {"code": 499}}, LEFT_OUT),
        ("aiperf", {"metadata": {"request_start_ns": 1, "was_cancelled": True}}, LEFT_OUT),
        ("aiperf", {"metadata": {"request_start_ns": 1, "benchmark_phase": "warmup"}}, OTHER),
        ("inference-perf", {"error": {"error_type": "Timeout"}}, LEFT_OUT),
        ("Dynamo's ends", {"event_type": "tool_end"}, OTHER),
        ("LiteLLM's standard payload", {"status": "failure"}, LEFT_OUT),
        ("LiteLLM's standard payload", {"cache_hit": True}, LEFT_OUT),
        ("LiteLLM's standard payload", {"call_type": "aembedding"}, OTHER),
        (LANGFUSE, {"level": "ERROR"}, LEFT_OUT),
        (LANGFUSE, {"type": "SPAN"}, OTHER),
        (OTLP, {"status": {"code": 2}}, LEFT_OUT),
        (OTLP, {"attributes": [MARKED]}, OTHER),
        (OTLP, {"attributes": AROUND}, OTHER),
        (OTLP, {"attributes": EMBEDDED}, OTHER),
        (BATCH, {"response": {"status_code": 500, "body": {}}}, LEFT_OUT),
        (CHAT, {"error": "overloaded"}, LEFT_OUT),
        (TABLE, {"status": 503}, LEFT_OUT),
        (TABLE, {"error": "timed out"}, LEFT_OUT),
        (TABLE, {"success": False}, LEFT_OUT),
        (TABLE, {"latency": -1}, LEFT_OUT),
        ("vllm bench serve", {"output_lens": [-3]}, LEFT_OUT),
        ("vllm bench serve", {"input_lens": [1.5]}, LEFT_OUT),
        ("lmsys", {"conversation": [ANSWER]}, LEFT_OUT),
    ],
)
def test_failures_are_left_out_and_what_is_no_request_counts_apart(
    tmp_path: Path, variant: str, fields: dict[str, Any], counts: tuple[int, int]
) -> None:
    bad = row(variant, **fields)
    found, source, _ = read(lines(tmp_path / "log", bad, *[row(variant)] * 3, bad))
    assert (len(found), source.format.name) == (3, VARIANTS[variant].format)
    assert (source.counts.left_out.total(), source.counts.other) == counts


TURNS = [*A.messages, ANSWER, {"role": "user", "content": "And?"}, {"role": "tool"},
         {"role": "assistant", "content": "Thus."}]  # fmt: skip
LIMITED = {"prompt_tokens": 3, "completion_tokens": 5, "finish_reason": {"type": "length"}}
PAYLOAD = {"request": {"prompt": "Why?", "max_tokens": 9}, "response": {
    "choices": [{"text": "So.", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 9}}}  # fmt: skip
STEP = {"in": 9, "out": 8}


@pytest.mark.parametrize(
    ("variant", "fields", "expected"),
    [
        (SGLANG, {"obj": {"text": "x" * 2051}}, {"prompt": "x" * 1024, "cap_tokens": None}),
        (SGLANG, {"obj": {"sampling_params": {}}}, {"cap_tokens": 128, "prompt": ""}),
        (SGLANG, {"obj": {"sampling_params": {"max_new_tokens": None}}}, {"cap_tokens": 0}),
        (SGLANG, {"out": {"meta_info": LIMITED}}, {"is_cut": True, "output_tokens": 5}),
        ("Dynamo's ends", {"event_type": "request_payload", "payload": PAYLOAD},
         {"prompt": "Why?", "output": "So.", "cap_tokens": 9, "is_cut": True, "input_tokens": 2,
          "output_tokens": 9, "arrival": None}),
        ("Dynamo", {}, {"blocks": (2**63 + 1, 2**64 - 1), "block_tokens": 16, "session": "s0"}),
        ("LiteLLM's standard payload", {"session_id": "s"}, {"session": "s", "output": None}),
        (LANGFUSE, {"modelParameters": {"maxTokens": 7}}, {"cap_tokens": 7, "output": None}),
        (OTLP, {"attributes": {"llm.usage.completion_tokens": 5, "session.id": "s",
                               "gen_ai.response.finish_reasons": ["length"]}},
         {"output_tokens": 5, "session": "s", "is_cut": True}),
        (OTLP, {"startTimeUnixNano": None, "startTime": [17, 5e8], "endTimeUnixNano": None},
         {"arrival": 17.5}),
        (BATCH, {"response": {"body": {"choices": [{"message": ANSWER}] * 4, "usage": A.usage}}},
         {"output_tokens": round(A.outputs / 4), "arrival": None, "output": "So."}),
        # The last answer of a chat with usage, and the first of a data set.
        (CHAT, {"messages": TURNS}, {"prompt": "And?", "output_tokens": A.outputs}),
        (CHAT, {"messages": TURNS, "usage": None}, {"prompt": A.text, "output": "So."}),
        (CHAT, {"response": CALL}, {"input_tokens": A.inputs, "output_tokens": A.outputs}),
        ("Bailian", {"parent_chat_id": -1}, {"id": "1", "parent": "", "block_tokens": 16}),
        ("Bailian", {}, {"id": "1", "parent": "0", "blocks": (*range(-(-A.inputs // 16)),)}),
        ("vllm bench serve", {"itls": None}, {"ttlt_s": None, "cap_tokens": A.outputs}),
        # Steps have the time of the session, or of the step around them.
        ("Weka", {"requests": [{"t": 5, "requests": [STEP | {"t": 1}]}]}, {"arrival": 6.0}),
        ("Weka", {"requests": [{"t": 5, "requests": [STEP | {"t": 7}]}]}, {"arrival": 7.0}),
        ("Weka", {"requests": [STEP | {"t": 0, "stop": "length", "hash_ids": [3]}], "id": "s",
                  "hash_id_scope": "global"},
         {"is_cut": True, "session": "s", "blocks": (3,), "block_tokens": 64}),
        (TABLE, {"finishReason": "length"}, {"is_cut": True, "cap_tokens": 800}),
        (TABLE, {"thread_id": 4, "arrivalTime": None, "start_ms": 7, "end_ms": 500},
         {"session": "4", "arrival": 0.007, "end": 0.5}),
        (TABLE, {"metrics": {"prompt_tokens": 9}, "inputTokens": None}, {"input_tokens": 9}),
    ],
)  # fmt: skip
def test_special_fields(
    tmp_path: Path, variant: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    (found, *_), source, _ = read(lines(tmp_path / "log", row(variant, **fields)))
    assert source.format.name == VARIANTS[variant].format
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_batch_takes_its_prompts_from_the_input_file(tmp_path: Path) -> None:
    (tmp_path / "a_output.jsonl").write_text(VARIANTS[BATCH].write(ASKED))
    bodies = [
        {"custom_id": f"r{a.number}", "body": {"messages": a.messages, "max_tokens": 800}}
        for a in ASKED
    ]
    lines(tmp_path / "b_input.jsonl", *bodies)
    found = [each for source in LogReader([str(tmp_path)]).sources() for _, each in source]
    assert [(each.prompt, each.cap_tokens) for each in found] == [(a.text, 800) for a in ASKED]


LENGTHS = {"input_length": 305, "output_length": 5}


def test_traces_have_blocks_pauses_and_sessions(tmp_path: Path) -> None:
    trace = [LENGTHS | {"timestamp": t, "hash_ids": [*range(20)]} for t in range(3)]
    found, _, _ = read(lines(tmp_path / "log", *trace))
    assert {each.block_tokens for each in found} == {16}
    of_session = LENGTHS | {"session_id": "s"}
    log = lines(tmp_path / "log", of_session | {"timestamp": 5}, of_session | {"delay": 1500})
    one, other = read(log)[0]
    assert (one.session, other.session, other.arrival, other.pause_s) == ("s", "s", None, 1.5)


def test_a_format_can_be_named(tmp_path: Path) -> None:
    log = lines(tmp_path / "log", LENGTHS | {"timestamp": 1})
    assert read(log)[1].format.name == "mooncake"
    found, source, _ = read(log, ReadOptions(format="table"))
    assert (source.format.name, found[0].output_tokens) == ("table", 5)


def test_files_of_a_folder_that_are_no_logs_are_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Logs\n")
    (tmp_path / ".hidden").write_text("{}")
    (tmp_path / "a.csv").write_text("t,input,output\n1,2,3\n")
    reader = LogReader([str(tmp_path)])
    assert [Path(source.path).name for source in reader.sources()] == ["a.csv"]
    assert [said.partition(" is ")[0][-9:] for said in reader.skipped] == ["README.md"]
    (tmp_path / "a.csv").unlink()
    with pytest.raises(DatasetError, match="no log found"):
        LogReader([str(tmp_path)]).sources()


def test_recognition_is_explained(tmp_path: Path) -> None:
    _, _, said = read(log(tmp_path, VARIANTS["Azure, 2023"].write(ASKED) + "x,1,2\ny,1,2\n"))
    for part in ("azure, by arrival TIMESTAMP", "read as UTC", "left out: 2 with a time"):
        assert part in said
