"""What an operator has, read: by SGLang's own writers, where it writes."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Self

import pytest

from bench.whatif.log import TrafficLog
from bench.whatif.read import read_log
from bench.whatif.shared_prompts import spans_of
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


def test_request_dumps_as_a_server_writes_them(tmp_path: Path) -> None:
    answer = {"text": "yes", "meta_info": META | STOPPED}
    ids = asked(None, input_ids=list(range(200)))
    unbound = asked("Tell me.")
    unbound.sampling_params = {"max_new_tokens": None}
    no_tokens = {"text": "", "meta_info": META | STOPPED | {"completion_tokens": 0}}
    dump = {
        "server_args": asked(),  # any object of a class of SGLang's
        "requests": [
            (asked(), answer, 1000.0, 1002.5),
            (ids, {"meta_info": META | CUT}, 999.0, 1003.0),
            (unbound, answer, 1001.0, 1004.0),
            (asked(), no_tokens, 1005.0, 1006.0),
        ],
    }
    (tmp_path / "2026-01-01_00-00-00.pkl").write_bytes(pickle.dumps(dump))
    log = read_log([tmp_path])
    assert lengths(log) == [(0.0, 12, 30, 64), (1.0, 12, 30, 64), (2.0, 12, 30, 0)]
    assert [r.is_cut for r in log.requests] == [True, False, False]
    assert [r.prompt for r in log.requests] == ["", asked().text, "Tell me."]
    assert [r.ttlt_s for r in log.requests] == [4.0, 2.5, 3.0]
    assert len(log.requests[0].blocks) == 200 // 64
    assert log.num_unusable == 1
    assert "request 4" in log.first_unusable


class Malice:
    """Unpickled as ever, it runs."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


def test_a_dump_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = (asked(), {"meta_info": META | STOPPED, "more": Malice()}, 0.0, 1.0)
    (tmp_path / "dump.pkl").write_bytes(pickle.dumps({"requests": [good], "evil": Malice()}))
    assert len(read_log([tmp_path / "dump.pkl"]).requests) == 1
    assert not (tmp_path / "ran").exists()


class Stopped(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(2026, 1, 1, 12, 0, 0, 250_000, tz)


@pytest.fixture(params=["json", "text"])
def request_log(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    from sglang.srt.utils import log_utils
    from sglang.srt.utils.request_logger import RequestLogger

    # However long the host takes from line to line. The text format has the lines' own times.
    monkeypatch.setattr(log_utils, "datetime", Stopped)
    monkeypatch.setattr(logging.Formatter, "formatTime", lambda *_: "2026-01-01 12:00:00")
    folder = tmp_path / "log"
    logger = RequestLogger(True, 3, request.param, [str(folder)])
    logger.log_received_request(asked())
    for reason in (STOPPED, CUT):
        out = {"text": "'prompt_tokens': 9", "output_ids": [1, 2], "meta_info": META | reason}
        logger.log_finished_request(asked(), out)
    for target in logger.targets:
        for handler in target.handlers:
            handler.close()
    return request.param, folder


def test_the_request_log_as_a_server_writes_it(request_log: tuple[str, Path]) -> None:
    form, folder = request_log
    log = read_log([folder])
    assert [one[1:] for one in lengths(log)] == [(12, 30, 64)] * 2
    assert sorted(r.is_cut for r in log.requests) == [False, True]
    assert {r.ttlt_s for r in log.requests} == {2.5}
    # Whose arrival was logged came then; the other 2.5 s before its end.
    assert log.requests[1].arrival_s == (2.5 if form == "json" else 0.0)
    assert {r.prompt for r in log.requests} == ({asked().text} if form == "json" else {""})
    assert log.num_unusable == 0


class Words:
    """A tokenizer that needs no model."""

    def decode(self, ids: list[int]) -> str:
        return f"{len(ids)} words"


def test_what_servers_wrote_warms_a_store_too(
    request_log: tuple[str, Path], tmp_path: Path
) -> None:
    form, folder = request_log
    if form == "text":  # which has no prompts
        with pytest.raises(DatasetError, match="--log-requests-level 2"):
            list(Reader(str(folder)))
    else:
        reader = Reader(str(folder))
        assert [(r.prompt, r.output_tokens, r.input_tokens, r.censored) for r in reader] == [
            (asked().text, 30, 12, False), (asked().text, 30, 12, True),
        ]  # fmt: skip
        assert (reader.num_read, reader.num_malformed) == (2, 0)
        (log,) = folder.iterdir()
        bare = "".join(line[line.find("{") :] for line in log.open())
        bare += json.dumps({"timestamp": "2026-01-01T12:00:00", "event": "request.received.openai"})
        assert read_log([log]).num_unusable == 0
        (tmp_path / "bare.jsonl").write_text(bare)
        reader = Reader(str(tmp_path / "bare.jsonl"))
        assert (len(list(reader)), reader.num_malformed) == (2, 0)
        assert read_log([tmp_path / "bare.jsonl"]).num_unusable == 0
    ids = asked(None, input_ids=list(range(200)))
    dump = {"requests": [(ids, {"meta_info": META | STOPPED}, 1.0, 2.0)]}
    (tmp_path / "dump.pkl").write_bytes(pickle.dumps(dump))
    with pytest.raises(DatasetError, match="token ids: --tokenizer"):
        list(Reader(str(tmp_path / "dump.pkl")))
    (row,) = Reader(str(tmp_path / "dump.pkl"), tokenizer=Words())
    assert (row.prompt, row.output_tokens) == ("200 words", 30)


def test_a_servers_own_log_is_read_for_what_it_says_of_requests(
    request_log: tuple[str, Path], tmp_path: Path
) -> None:
    """Warnings, progress bars and all."""
    noise = "/sglang/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ, currently.\n"
    bars = "".join(f"\rLoading, shards: {done}% |" for done in range(3))
    (written,) = request_log[1].iterdir()
    log = tmp_path / "server.log"
    log.write_bytes((noise + bars + "\r" + written.read_text() + noise).encode())
    read = read_log([log])
    assert (len(read.requests), read.num_unusable) == (2, 0)
    if request_log[0] == "json":
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
    assert (log.num_forecasts, log.requests[2].forecast) == (1, said)
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
