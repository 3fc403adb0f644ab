"""What an operator has, read: by SGLang's own writers, where it writes."""

from __future__ import annotations

import gzip
import json
import logging
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest

from bench.whatif.log import TrafficLog
from bench.whatif.read import read_log
from bench.whatif.simulation import spans_of
from bench.workloads.prompts import WorkloadError
from predictor_store.data.datasets import Reader
from predictor_store.data.files import DatasetError
from sage_sched.distribution import LengthDistribution

META = {"prompt_tokens": 12, "completion_tokens": 30, "e2e_latency": 2.5}
STOPPED = {"finish_reason": {"type": "stop", "matched": 2}}
CUT = {"finish_reason": {"type": "length", "length": 30}}


def asked(text: str | None = "Say 'meta_info': {'prompt_tokens': 7}.", **more: Any) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(text=text, sampling_params={"max_new_tokens": 64}, rid="one", **more)


def lengths(log: TrafficLog) -> list[tuple[float, int, int, int | None]]:
    return [(r.arrival_s, r.input_tokens, r.output_tokens, r.cap_tokens) for r in log.requests]


class Stopped(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2026, 1, 1, 12, 0, 0, 250_000, tz)


def written_log(
    form: str, folder: Path, monkeypatch: pytest.MonkeyPatch, request: Any = None
) -> Path:
    from sglang.srt.utils import log_utils
    from sglang.srt.utils.request_logger import RequestLogger

    # However long the host takes from line to line.
    monkeypatch.setattr(log_utils, "datetime", Stopped)
    monkeypatch.setattr(logging.Formatter, "formatTime", lambda *_: "2026-01-01 12:00:00")
    logger = RequestLogger(True, 3, form, [str(folder)])
    request = request or asked()
    logger.log_received_request(request)
    for reason in (STOPPED, CUT):
        out = {"text": "'prompt_tokens': 9", "output_ids": [1, 2], "meta_info": META | reason}
        logger.log_finished_request(request, out)
    for target in logger.targets:
        for handler in target.handlers:
            handler.close()
    return folder


@pytest.fixture
def request_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return written_log("json", tmp_path / "log", monkeypatch)


def test_the_request_log_as_a_server_writes_it(request_log: Path) -> None:
    log = read_log([request_log])
    assert [one[1:] for one in lengths(log)] == [(12, 30, 64)] * 2
    assert sorted(r.is_cut for r in log.requests) == [False, True]
    assert {r.ttlt_s for r in log.requests} == {2.5}
    assert log.requests[1].arrival_s == 0.0  # 2.5 s before its end, as the other
    assert {r.prompt for r in log.requests} == {asked().text}
    assert log.num_unusable == 0


def test_a_request_log_in_text_is_refused_and_the_flag_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written_log("text", tmp_path / "log", monkeypatch)
    with pytest.raises(WorkloadError, match="--log-requests-format json"):
        read_log([folder])
    with pytest.raises(DatasetError, match="--log-requests-format json"):
        list(Reader(str(folder)))


class Words:
    """A tokenizer that needs no model."""

    def decode(self, ids: list[int]) -> str:
        return f"{len(ids)} words"


def test_what_servers_wrote_warms_a_store_too(request_log: Path, tmp_path: Path) -> None:
    reader = Reader(str(request_log))
    assert [(r.prompt, r.output_tokens, r.input_tokens, r.censored) for r in reader] == [
        (asked().text, 30, 12, False), (asked().text, 30, 12, True),
    ]  # fmt: skip
    assert (reader.num_read, reader.num_malformed) == (2, 0)
    (log,) = request_log.iterdir()
    bare = "".join(line[line.find("{") :] for line in log.open())
    bare += json.dumps({"timestamp": "2026-01-01T12:00:00", "event": "request.received.openai"})
    assert read_log([log]).num_unusable == 0
    (tmp_path / "bare.jsonl").write_text(bare)
    reader = Reader(str(tmp_path / "bare.jsonl"))
    assert (len(list(reader)), reader.num_malformed) == (2, 0)
    assert read_log([tmp_path / "bare.jsonl"]).num_unusable == 0


def test_prompts_that_are_token_ids_are_read_with_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = asked(None, input_ids=list(range(200)))
    ids.sampling_params = {"max_new_tokens": None}
    folder = written_log("json", tmp_path / "log", monkeypatch, ids)
    log = read_log([folder])
    assert [r.cap_tokens for r in log.requests] == [0, 0]
    assert [r.prompt for r in log.requests] == ["", ""]
    assert len(log.requests[0].blocks) == 200 // 64
    with pytest.raises(DatasetError, match="token ids: --tokenizer"):
        list(Reader(str(folder)))
    row, _ = Reader(str(folder), tokenizer=Words())
    assert (row.prompt, row.output_tokens) == ("200 words", 30)


def test_a_servers_own_log_is_read_for_what_it_says_of_requests(
    request_log: Path, tmp_path: Path
) -> None:
    """Warnings, progress bars and all."""
    noise = "/sglang/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ, currently.\n"
    bars = "".join(f"\rLoading, shards: {done}% |" for done in range(3))
    (written,) = request_log.iterdir()
    log = tmp_path / "server.log"
    log.write_bytes((noise + bars + "\r" + written.read_text() + noise).encode())
    read = read_log([log])
    assert (len(read.requests), read.num_unusable) == (2, 0)
    reader = Reader(str(log))
    assert (len(list(reader)), reader.num_malformed) == (2, 0)
    log.write_bytes((noise + bars).encode())
    with pytest.raises(WorkloadError, match="is no JSON, no header of columns"):
        read_log([log])


def test_a_stray_carriage_return_costs_its_row_alone(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    long = '"' + "word " * 50_000 + '"'
    file.write_bytes(
        b'arrival_s,input_tokens,output_tokens,prompt\r\n1,2,3,a\r\n2,2,3,b\rc\r\n3,2,3,"d\n'
        b'e"\r\n4,2,3,' + long.encode() + b"\r\n"
    )
    log = read_log([file])
    assert [r.arrival_s for r in log.requests] == [0.0, 1.0, 2.0, 3.0]
    assert log.num_unusable == 1  # the rest of the second
    file.write_bytes(b"arrival_s,input_tokens,output_tokens\r1,2,3\r2,2,3")
    assert len(read_log([file]).requests) == 2


def test_tables_by_any_of_the_usual_names(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    log = read_log([tmp_path / "azure.csv"])
    assert [one[1:] for one in lengths(log)] == [(374, 44, None), (396, 109, None)]
    assert log.arrivals_s == pytest.approx(4.314579, abs=1e-4)
    rows = 'arrival_s,input_tokens,output_tokens,max_tokens,prompt\n5,3,4,9,"a, b"\n'
    (tmp_path / "own.csv").write_text(rows + "6,none,4,9,c\n7,3,4.5,9,d\n")
    log = read_log([tmp_path / "own.csv"])
    assert lengths(log) == [(0.0, 3, 4, 9)]
    assert log.requests[0].prompt == "a, b"
    assert (log.num_unusable, "row 3" in log.first_unusable) == (2, True)


def test_json_lines_shadow_records_and_mooncake_together(tmp_path: Path) -> None:
    said = LengthDistribution.from_samples([5, 9], "history")
    rows: list[dict[str, Any]] = [
        {"arrival_s": 3.0, "input_tokens": 7, "output_tokens": 5, "prediction": said.as_fields()},
        {"timestamp": 2000, "input_length": 600, "output_length": 6, "hash_ids": [1, 2]},
        {"timestamp": 2500, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]},
        {"t": 4.5, "prompt_tokens": 70, "completion_tokens": 50},
    ]
    with gzip.open(tmp_path / "mixed.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in rows) + "\n{broken\n")
    log = read_log([tmp_path / "mixed.jsonl.gz"])
    assert [r.arrival_s for r in log.requests] == [0.0, 0.5, 1.0, 2.5]
    assert [r.forecast for r in log.requests] == [None, None, said, None]
    assert log.num_unusable == 1
    spans = spans_of(log.requests)
    assert spans[0][0] == spans[1][0] == (1, 0, 512)
    assert spans[0][1][0] != spans[1][1][0]
    assert (spans[2], spans[3]) == ((), ())


def test_bench_serving_has_lengths_and_no_arrivals(tmp_path: Path) -> None:
    run = {
        "request_rate": 4.0, "mean_e2e_latency_ms": 1.0, "input_lens": [5, 6, 7],
        "output_lens": [2, 3, 4], "ttfts": [0.1, 0.2, 0.3], "itls": [[0.1], [0.1, 0.1], [0.1]],
        "errors": ["", "", "gone"],
    }  # fmt: skip
    (tmp_path / "run.jsonl").write_text(json.dumps(run) + "\n")
    log = read_log([tmp_path / "run.jsonl"])
    assert [one[1:] for one in lengths(log)] == [(5, 2, 2), (6, 3, 3)]
    assert log.requests[1].ttlt_s == pytest.approx(0.4)
    at_once = run | {"request_rate": float("inf")}
    (tmp_path / "run.jsonl").write_text(json.dumps(at_once) + "\n")
    assert read_log([tmp_path / "run.jsonl"]).arrivals_s == 0.0
    (tmp_path / "run.jsonl").write_text(json.dumps(at_once | {"max_concurrency": 8}) + "\n")
    with pytest.raises(WorkloadError, match="no log of arrivals"):
        read_log([tmp_path / "run.jsonl"])
    del run["input_lens"]
    (tmp_path / "run.jsonl").write_text(json.dumps(run) + "\n")
    with pytest.raises(WorkloadError, match="--output-details"):
        read_log([tmp_path / "run.jsonl"])


@pytest.mark.parametrize("text", ["", "nothing,of,use\n1,2,3\n", "[]\n", "\x80junk"])
def test_what_holds_no_request_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_bytes(text.encode("latin-1"))
    with pytest.raises(WorkloadError, match="log"):
        read_log([tmp_path / "log"])
    with pytest.raises(WorkloadError, match="no-such-file"):
        read_log([tmp_path / "no-such-file"])


def test_prompts_that_begin_alike_share_their_beginning(tmp_path: Path) -> None:
    system = "You are a careful assistant. " * 40
    rows = [
        {"t": i, "input_tokens": 300, "output_tokens": 5, "prompt": system + question}
        for i, question in enumerate(["What is rain?", "What is snow?"])
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    one, other = spans_of(read_log([tmp_path / "log.jsonl"]).requests)
    assert one[:-1] == other[:-1] != ()
    assert sum(end - first for _, first, end in one) == 300
    assert 200 < sum(end - first for _, first, end in one[:-1]) < 300
