"""Logs of operators, written by SGLang's own writers where it writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.whatif.log import TrafficLog
from bench.whatif.read import read_log
from bench.whatif.simulation import spans_of
from predictor_store.data.observations import Observations
from predictor_store.logs.errors import DatasetError
from sage_sched.distribution import LengthDistribution
from sage_sched.errors import UserError

TEXT = "Say 'meta_info': {'prompt_tokens': 7}."
META = {"prompt_tokens": 12, "completion_tokens": 30, "e2e_latency": 2.5}
STOPPED = {"finish_reason": {"type": "stop", "matched": 2}}
CUT = {"finish_reason": {"type": "length", "length": 30}}


def lengths(log: TrafficLog) -> list[tuple[float, int, int, int | None]]:
    return [(r.arrival_s, r.input_tokens, r.output_tokens, r.cap_tokens) for r in log.requests]


def read(path: Path, text: str) -> TrafficLog:
    path.write_text(text, encoding="latin-1", newline="")
    return read_log([path])


def written_log(form: str, folder: Path, cap: int | None = 64, **prompt: Any) -> Path:
    """Write SGLang's log of a request that ended twice."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.utils.request_logger import RequestLogger

    prompt = prompt or {"text": TEXT}
    asked = GenerateReqInput(sampling_params={"max_new_tokens": cap}, rid="one", **prompt)
    logger = RequestLogger(True, 3, form, [str(folder)])
    logger.log_received_request(asked)
    for reason in (STOPPED, CUT):
        out = {"text": "'prompt_tokens': 9", "output_ids": [1, 2], "meta_info": META | reason}
        logger.log_finished_request(asked, out)
    for target in logger.targets:
        for handler in target.handlers:
            handler.close()
    return folder


@pytest.fixture
def request_log(tmp_path: Path) -> Path:
    (log,) = written_log("json", tmp_path / "log").iterdir()
    return log


def test_the_request_log_as_a_server_writes_it(request_log: Path) -> None:
    log = read_log([request_log.parent])
    assert [one[1:] for one in lengths(log)] == [(12, 30, 64)] * 2
    assert sorted(r.is_cut for r in log.requests) == [False, True]
    assert {r.ttlt_s for r in log.requests} == {2.5}
    assert {r.prompt for r in log.requests} == {TEXT}
    assert "2 requests used" in " ".join(log.lines)


def test_a_request_log_in_text_is_refused_and_the_flag_named(tmp_path: Path) -> None:
    folder = written_log("text", tmp_path / "log")
    with pytest.raises(DatasetError, match="--log-requests-format json"):
        read_log([folder])
    with pytest.raises(DatasetError, match="--log-requests-format json"):
        Observations([str(folder)])


def test_what_servers_wrote_warms_a_store_too(request_log: Path, tmp_path: Path) -> None:
    """Warnings, progress bars and all."""
    found = Observations([str(request_log)])
    assert [(r.prompt, r.output_tokens, r.input_tokens, r.censored) for r in found] == [
        (TEXT, 30, 12, False), (TEXT, 30, 12, True),
    ]  # fmt: skip
    written = request_log.read_text()
    bare = "".join(line[line.find("{") :] for line in written.splitlines(keepends=True))
    bare += json.dumps({"timestamp": "2026-01-01T12:00:00", "event": "request.received.openai"})
    noise = "/sglang/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ, currently.\n"
    noise += "".join(f"\rLoading, shards: {done}% |" for done in range(3)) + "\r"
    for text in (bare, noise + written + noise):
        log = read(tmp_path / "server.log", text)
        assert len(log.requests) == 2
        assert "left out" not in " ".join(log.lines)
        found = Observations([str(tmp_path / "server.log")])
        assert (len(list(found)), found.sources[0].counts.left_out.total()) == (2, 0)
    with pytest.raises(DatasetError, match="that is no JSON"):
        read(tmp_path / "server.log", noise)


class Words:
    """A tokenizer that needs no model."""

    def decode(self, ids: list[int]) -> str:
        return f"{len(ids)} words"


def test_prompts_that_are_token_ids_are_read_with_a_tokenizer(tmp_path: Path) -> None:
    folder = written_log("json", tmp_path / "log", None, input_ids=list(range(200)))
    log = read_log([folder])
    assert [(r.cap_tokens, r.prompt) for r in log.requests] == [(0, "")] * 2
    assert len(log.requests[0].blocks) == 200 // 64
    with pytest.raises(DatasetError, match="token ids: --tokenizer"):
        list(Observations([str(folder)]))
    row, _ = Observations([str(folder)], tokenizer=Words())
    assert (row.prompt, row.output_tokens) == ("200 words", 30)


def test_predictions_of_a_shadow_record_and_blocks_of_a_trace(tmp_path: Path) -> None:
    said = LengthDistribution.from_samples([5, 9], "history")
    record = {"arrival_s": 3.0, "input_tokens": 7, "output_tokens": 5, "max_new_tokens": 9}
    records = [record | {"prediction": said.as_fields()}, record | {"prediction": None}]
    trace = [
        {"timestamp": 2000, "input_length": 600, "output_length": 6, "hash_ids": [1, 2]},
        {"timestamp": 2500, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]},
    ]
    (tmp_path / "a").write_text("".join(f"{json.dumps(row)}\n" for row in records) + "{broken\n")
    (tmp_path / "b").write_text("".join(f"{json.dumps(row)}\n" for row in trace))
    log = read_log([tmp_path])
    assert [r.arrival_s for r in log.requests] == [0.0, 0.5, 1.0, 1.0]
    assert [r.forecast for r in log.requests] == [None, None, said, None]
    assert "1 that is no JSON" in " ".join(log.lines)
    spans = spans_of(log.requests)
    assert spans[0][0] == spans[1][0] == (1, 0, 512)
    assert spans[0][1][0] != spans[1][1][0]
    assert spans[2] == ()


RUN = {
    "request_rate": 4.0, "mean_e2e_latency_ms": 1.0, "input_lens": [5, 6, 7],
    "output_lens": [2, 3, 4], "ttfts": [0.1, 0.2, 0.3], "itls": [[0.1], [0.1, 0.1], [0.1]],
    "errors": ["", "", "gone"],
}  # fmt: skip
AT_ONCE = {"request_rate": float("inf")}


def test_bench_serving_has_lengths_and_no_arrivals(tmp_path: Path) -> None:
    log = read(tmp_path / "run.jsonl", json.dumps(RUN))
    assert [one[1:] for one in lengths(log)] == [(5, 2, 2), (6, 3, 3)]
    assert log.requests[1].ttlt_s == pytest.approx(0.4)
    assert read(tmp_path / "run.jsonl", json.dumps(RUN | AT_ONCE)).last_arrival_s == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("nothing,of,use\n1,2,3\n", "no known format"),
        ("[]\n", "is empty"),
        ("\x80junk", "no known format"),
        (json.dumps(RUN | AT_ONCE | {"max_concurrency": 8}), "without arrivals"),
        (json.dumps({k: v for k, v in RUN.items() if k != "input_lens"}), "--output-details"),
        ('{"messages": [], "usage": {"completion_tokens": 3}}', "without an arrival time.*--rate"),
        ('{"t": 1, "input_tokens": 3, "output": "So."}', "--tokenizer MODEL_PATH counts"),
    ],
)
def test_a_log_without_requests_names_the_gap(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path / "log", text)
    with pytest.raises(UserError, match="no-such-file"):
        read_log([tmp_path / "no-such-file"])


def test_arrivals_are_drawn_if_there_are_none_and_a_rate_is_named(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    rows = [{"messages": [{"role": "user", "content": "Why?"}], "usage": usage}] * 400
    (tmp_path / "log").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    log = read_log([tmp_path / "log"], rate=5.0)
    assert len(log.requests) == 400
    assert log.last_arrival_s == pytest.approx(400 / 5.0, rel=0.2)
    assert "drawn at --rate" in " ".join(log.lines)
    (tmp_path / "log").write_text("t,input,output\n1,2,3\n,2,3\n")
    assert len(read_log([tmp_path / "log"], rate=5.0).requests) == 1


def test_no_more_requests_are_read_than_the_limit(tmp_path: Path) -> None:
    rows = "".join(f"{i},7,5\n" for i in range(50))
    (tmp_path / "log").write_text(f"t,input,output\n{rows}")
    log = read_log([tmp_path / "log"], limit=30)
    assert len(log.requests) == 30
    assert "no more than 30 requests are read" in " ".join(log.lines)


def test_prompts_that_begin_alike_share_their_beginning(tmp_path: Path) -> None:
    system = "You are a careful assistant. " * 40
    rows = [
        {"t": i, "input_tokens": 300, "output_tokens": 5, "prompt": system + question}
        for i, question in enumerate(["What is rain?", "What is snow?"])
    ]
    log = read(tmp_path / "log.jsonl", "\n".join(json.dumps(row) for row in rows))
    one, other = spans_of(log.requests)
    assert one[:-1] == other[:-1] != ()
    assert sum(end - first for _, first, end in one) == 300
    assert 200 < sum(end - first for _, first, end in one[:-1]) < 300
