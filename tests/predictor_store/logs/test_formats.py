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
from predictor_store.logs.messages import was_cut
from predictor_store.logs.reader import LogReader, ReadOptions, Source
from predictor_store.logs.registry import FORMATS, format_of
from predictor_store.logs.request import LoggedRequest
from predictor_store.logs.rows import raw_rows
from predictor_store.logs.summary import lines_of
from tests.predictor_store.logs.variants import VARIANTS, date, filled, made
from tests.predictor_store.samples import lines

ASKED = made()
A = ASKED[1]


def read(path: Path, options: ReadOptions | None = None) -> tuple[list[LoggedRequest], Source, str]:
    """Return the requests of a file, and the first lines of output."""
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
    left_out = source.counts.left_out.total()
    assert (source.format.name, len(found), left_out) == (format_, 60, variant.num_failed)
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
    output = "So." if {"o", "-"} & {*has} else None
    assert {(each.output, each.is_cut) for each in found} == {(output, False)}
    assert len(source.context.notes) == variant.num_notes
    # bench_serving gives the wanted length as the cap.
    own_caps = {None, *(each.output_tokens for each in found)}
    assert {each.cap_tokens for each in found} <= ({800} if "c" in has else own_caps)
    assert all(each.session for each in found) == ("s" in has)
    assert len({each.session for each in found}) == (15 if "$session" in variant.row else 1)
    ttlts_s = [ttlt_s(each, scale) for each in found]
    assert None in ttlts_s or ttlts_s == pytest.approx([a.ttlt_s for a in ASKED], abs=2e-3)
    assert (None in ttlts_s) == ("t" not in has)


def ttlt_s(request: LoggedRequest, scale: float) -> float | None:
    if request.ttlt_s is None and request.end is not None and request.arrival is not None:
        return (request.end - request.arrival) * scale
    return request.ttlt_s


@pytest.mark.parametrize("name", [name for name in VARIANTS if "-" not in VARIANTS[name].has])
def test_a_bad_record_takes_none_of_its_neighbours_along(tmp_path: Path, name: str) -> None:
    """No model writes an answer of 10**9 tokens. An element of a list may be no object."""
    variant, asked = VARIANTS[name], [*ASKED[:30], A._replace(outputs=10**9), *ASKED[30:]]
    text = variant.write(asked)
    if variant.whole:
        row = filled(variant.row, A)
        text = text.replace(row, f"{row},\nnull", 1)
    found, source, _ = read(log(tmp_path, text))
    assert [each.output_tokens for each in found] == [a.outputs for a in ASKED]
    expected = variant.num_failed + 1 + bool(variant.whole)
    assert (source.counts.left_out.total(), source.counts.other) == (expected, 0)


def damaged(text: str, chance: random.Random) -> str:
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


CHANGED = [
    (name, kind, change)
    for name, variant in VARIANTS.items()
    for kind in ("no_request", "left_out")
    for change in getattr(variant, kind)
]
FOUND = [(name, *case) for name, variant in VARIANTS.items() for case in variant.found]


@pytest.mark.parametrize(("name", "kind", "change"), CHANGED)
def test_failures_are_left_out_and_what_is_no_request_counts_apart(
    tmp_path: Path, name: str, kind: str, change: str
) -> None:
    sound, bad = VARIANTS[name].changed(A, "{}"), VARIANTS[name].changed(A, change)
    found, source, _ = read(lines(tmp_path / "log", bad, *[sound] * 3, bad))
    assert (len(found), source.format.name) == (3, VARIANTS[name].format)
    counts = source.counts.left_out.total(), source.counts.other
    assert counts == ((2, 0) if kind == "left_out" else (0, 2))


@pytest.mark.parametrize(("name", "change", "expected"), FOUND)
def test_special_fields(tmp_path: Path, name: str, change: str, expected: str) -> None:
    (*_, found), source, _ = read(lines(tmp_path / "log", VARIANTS[name].changed(A, change)))
    assert source.format.name == VARIANTS[name].format
    for field, value in json.loads(filled(expected, A)).items():
        read_value = getattr(found, field)
        assert (list(read_value) if isinstance(value, list) else read_value) == value, field


REASONS: dict[bool, list[Any]] = {
    True: ["length", "max_tokens", "max_output_tokens", "FinishReason.MAX_TOKENS", "abort",
           "model_length", {"type": "length"}, {"reason": "length"}, ["stop", "length"]],
    False: ["stop", "end_turn", "FinishReason.STOP", {"type": "stop"}, ["stop"], [], None],
}  # fmt: skip


def test_reasons_say_whether_an_answer_was_cut() -> None:
    found = {cut: [reason for reason in every if was_cut(reason) is cut]
             for cut, every in REASONS.items()}  # fmt: skip
    assert found == REASONS


def test_of_a_long_prompt_sglang_logs_the_beginning_and_the_end(tmp_path: Path) -> None:
    change = json.dumps({"obj": {"text": "x" * 2051}})
    ((found,), _, _) = read(
        lines(tmp_path / "log", VARIANTS["SGLang's request log"].changed(A, change))
    )
    assert (found.prompt, found.cap_tokens) == ("x" * 1024, None)


def test_a_batch_takes_its_prompts_from_the_input_file(tmp_path: Path) -> None:
    (tmp_path / "a_output.jsonl").write_text(VARIANTS["OpenAI's batch"].write(ASKED))
    bodies = [
        {"custom_id": f"r{a.number}", "body": {"messages": a.messages, "max_tokens": 800}}
        for a in ASKED
    ]
    lines(tmp_path / "b_input.jsonl", *bodies)
    found = [each for source in LogReader([str(tmp_path)]).sources() for _, each in source]
    assert [(each.prompt, each.cap_tokens) for each in found] == [(a.text, 800) for a in ASKED]


def test_a_request_of_several_rows_counts_once(tmp_path: Path) -> None:
    logged = VARIANTS["API Management"].changed(A, '{"CorrelationId": "c"}')
    found, source, _ = read(
        lines(tmp_path / "log", *[logged | {"SequenceNumber": n} for n in (0, 1)])
    )
    assert (len(found), source.counts.other) == (1, 1)


def said(uuid: str, parent: str, at_s: float, **more: Any) -> dict[str, Any]:
    """Return a row of a session of Claude Code."""
    message = {"role": "user", "content": more.pop("text", "")}
    return {"type": "user", "sessionId": "s", "uuid": uuid, "parentUuid": parent or None,
            "timestamp": date(A.start_s + at_s), "message": message, **more}  # fmt: skip


def answer(num_out: int, **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 7, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 3}
    message = {"id": "m", "usage": {**usage, "output_tokens": num_out}, **more}
    return {"type": "assistant", "message": message}


def test_turns_of_an_agent_wait_for_tools_and_count_once(tmp_path: Path) -> None:
    """Each part of an answer is a row, and the last has the answer's length. A subagent runs
    alongside its session."""
    log_file = lines(
        tmp_path / "log", {"type": "summary", "summary": "Hello", "leafUuid": "f"},
        said("a", "", 0.0, text="Why?"),
        said("b", "a", 2.0, **answer(1), requestId="one"),
        said("c", "b", 3.0, **answer(50, stop_reason="tool_use"), requestId="one"),
        said("d", "c", 9.0),  # the tool's result
        said("e", "d", 12.0, **answer(20, stop_reason="max_tokens"), requestId="two"),
        said("f", "e", 13.0, **answer(0, model="<synthetic>"), isApiErrorMessage=True),
        said("x", "", 4.0, text="Look!", isSidechain=True, agentId="sub"),
        said("y", "x", 6.0, **answer(30), requestId="three", isSidechain=True, agentId="sub"),
    )  # fmt: skip
    found, source, _ = read(log_file)
    begin_s = A.start_s
    assert [
        (r.arrival and round(r.arrival - begin_s, 3), r.end and round(r.end - begin_s, 3),
         r.input_tokens, r.output_tokens, r.is_cut, r.prompt, r.session, r.id, r.parent)
        for r in found
    ] == [
        (0.0, 3.0, 110, 50, False, "Why?", "s", "one", ""),
        (9.0, 12.0, 110, 20, True, "Why?", "s", "two", "one"),
        (4.0, 6.0, 110, 30, False, "Look!", "s sub", "three", ""),
    ]  # fmt: skip
    assert (source.counts.left_out.total(), source.counts.other) == (1, 4)


def test_a_stream_of_genai_perf_has_lengths_if_its_usage_was_asked_for(tmp_path: Path) -> None:
    def piece(**event: Any) -> dict[str, str]:
        return {"response": f"data: {json.dumps(event)}\n\n"}

    words = [piece(choices=[{"delta": {"content": text}}]) for text in ("So", ".")]
    usage = piece(choices=[], usage=A.usage) | {}
    asked = {
        "timestamp": 1_790_000_000_000_000_000, "response_timestamps": [1_790_000_002_500_000_000],
        "request_inputs": {"payload": json.dumps({"messages": A.messages, "max_tokens": 800})},
    }  # fmt: skip
    requests = [
        asked | {"response_outputs": [*words, usage, {"response": "data: [DONE]"}]},
        asked | {"response_outputs": words},
        asked | {"response_outputs": [piece(error={"message": "busy"})]},
    ]
    whole = log(tmp_path, json.dumps({"experiments": [{"requests": requests}]}))
    found, source, _ = read(whole)
    assert [
        (r.input_tokens, r.output_tokens, r.output, r.prompt, r.cap_tokens, r.arrival, r.end)
        for r in found
    ] == [
        (length_in, length_out, "So.", A.text, 800, 1.79e9, 1.79e9 + 2.5)
        for length_in, length_out in ((A.inputs, A.outputs), (None, None))
    ]
    assert source.counts.left_out.total() == 1


def test_a_format_can_be_named(tmp_path: Path) -> None:
    mooncake = log(tmp_path, VARIANTS["Mooncake"].write(ASKED))
    found, source, _ = read(mooncake, ReadOptions(format="table"))
    assert (source.format.name, found[1].output_tokens) == ("table", A.outputs)


def test_files_of_a_folder_that_are_no_logs_are_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Logs\n")
    (tmp_path / ".hidden").mkdir()
    for place in (tmp_path, tmp_path / ".hidden"):
        (place / "a.csv").write_text("t,input,output\n1,2,3\n")
    reader = LogReader([str(tmp_path)])
    assert [source.path for source in reader.sources()] == [str(tmp_path / "a.csv")]
    assert [said.partition(" is ")[0][-9:] for said in reader.skipped] == ["README.md"]
    (tmp_path / "a.csv").unlink()
    with pytest.raises(DatasetError, match="no log found"):
        LogReader([str(tmp_path)]).sources()


def test_recognition_is_explained(tmp_path: Path) -> None:
    _, _, said = read(log(tmp_path, VARIANTS["Azure, 2023"].write(ASKED) + "x,1,2\ny,1,2\n"))
    for part in ("azure, by arrival TIMESTAMP", "read as UTC", "left out: 2 with a time"):
        assert part in said
