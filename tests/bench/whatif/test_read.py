"""Logs of operators. SGLang's own code writes SGLang's logs."""

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
from predictor_store.logs.reader import ReadOptions
from sage_sched.distribution import LengthDistribution
from sage_sched.errors import UserError
from tests.predictor_store.samples import lines

TEXT = "Say 'meta_info': {'prompt_tokens': 7}."
META = {"prompt_tokens": 12, "completion_tokens": 30, "e2e_latency": 2.5}
STOPPED = {"finish_reason": {"type": "stop", "matched": 2}}
CUT = {"finish_reason": {"type": "length", "length": 30}}


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
    found = {(r.input_tokens, r.output_tokens, r.cap_tokens, r.prompt) for r in log.requests}
    assert found == {(12, 30, 64, TEXT)}
    assert "2 requests used" in " ".join(log.lines)
    assert sorted((r.is_cut, r.ttlt_s) for r in log.requests) == [(False, 2.5), (True, 2.5)]
    observed = [(r.prompt, r.output_tokens, r.censored) for r in Observations([str(request_log)])]
    assert observed == [(TEXT, 30, False), (TEXT, 30, True)]


def test_a_servers_log_is_read_with_warnings_and_progress_bars(
    request_log: Path, tmp_path: Path
) -> None:
    noise = "/sglang/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ, currently.\n"
    noise += "".join(f"\rLoading, shards: {done}% |" for done in range(3)) + "\r"
    noise += json.dumps({"timestamp": "2026-01-01T12:00:00", "event": "request.received.openai"})
    log = read(tmp_path / "server.log", f"{noise}\n{request_log.read_text()}{noise}\n")
    assert len(log.requests) == 2
    assert "left out" not in " ".join(log.lines)
    with pytest.raises(DatasetError, match="--log-requests-format json"):
        read_log([written_log("text", tmp_path / "log in text")])


class Words:
    """A tokenizer that needs no model."""

    def decode(self, ids: list[int]) -> str:
        return f"{len(ids)} words"


def test_prompts_that_are_token_ids_are_read_with_a_tokenizer(tmp_path: Path) -> None:
    folder = written_log("json", tmp_path / "log", None, input_ids=list(range(200)))
    log = read_log([folder])
    assert {(r.cap_tokens, r.prompt, len(r.blocks)) for r in log.requests} == {(0, "", 200 // 64)}
    with pytest.raises(DatasetError, match="token ids, which --tokenizer"):
        list(Observations([str(folder)]))
    row, _ = Observations([str(folder)], tokenizer=Words())
    assert (row.prompt, row.output_tokens) == ("200 words", 30)


def test_predictions_of_a_shadow_record_and_blocks_of_a_trace(tmp_path: Path) -> None:
    said = LengthDistribution.from_samples([5, 9], "history")
    record = {"arrival_s": 3.0, "input_tokens": 7, "output_tokens": 5, "max_new_tokens": 9}
    trace = {"input_length": 600, "output_length": 6}
    lines(tmp_path / "a", record | {"prediction": said.as_fields()}, record | {"prediction": None})
    lines(
        tmp_path / "b", trace | {"timestamp": 2000, "hash_ids": [1, 2], "session_id": "s"},
        trace | {"timestamp": 2500, "hash_ids": [1, 3]}, trace | {"session_id": "s", "delay": 1500},
    )  # fmt: skip
    log = read_log([tmp_path])
    assert [r.arrival_s for r in log.requests] == [0.0, 0.5, 1.0, 1.0, 1.5]
    assert [r.forecast for r in log.requests] == [None, None, said, None, None]
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
    found = [(r.input_tokens, r.output_tokens, r.cap_tokens, r.ttlt_s) for r in log.requests]
    assert found == [(5, 2, 2, pytest.approx(0.2)), (6, 3, 3, pytest.approx(0.4))]
    assert read(tmp_path / "run.jsonl", json.dumps(RUN | AT_ONCE)).last_arrival_s == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing,of,use\n1,2,3\n", "no known format"),
        ("[]\n", "is empty"),
        ("\x80junk", "no known format"),
        (json.dumps(RUN | AT_ONCE | {"max_concurrency": 8}), "without arrivals"),
        (json.dumps({k: v for k, v in RUN.items() if k != "input_lens"}), "--output-details"),
        ('{"messages": [], "usage": {"completion_tokens": 3}}', "without an arrival time.*--rate"),
    ],
)
def test_a_log_without_requests_names_the_gap(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path / "log", text)
    with pytest.raises(UserError, match="no-such-file"):
        read_log([tmp_path / "no-such-file"])


def test_arrivals_are_drawn_if_there_are_none_and_a_rate_is_named(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3}
    row = {"messages": [{"role": "user", "content": "Why?"}], "usage": usage}
    log = read_log([lines(tmp_path / "log", *[row] * 400)], rate=5.0)
    assert len(log.requests) == 400
    assert log.last_arrival_s == pytest.approx(400 / 5.0, rel=0.2)
    assert any("--rate" in line for line in log.lines)
    chat = {"conversation_id": "x", "turn": 1, "conversation": row["messages"], "output_tokens": 5}
    chats = [chat | {"tstamp": 1.79e9 + 2 * i, "input_tokens": 7} for i in range(40)]
    log = read_log([lines(tmp_path / "chats", *chats)], rate=5.0)  # it has arrivals
    assert (log.last_arrival_s, "--rate" in "".join(log.lines)) == (78.0, False)
    table = lines(tmp_path / "log")
    table.write_text("t,input,output\n1,2,3\n,2,3\n" + "".join(f"{i},7,5\n" for i in range(50)))
    assert len(read_log([table], rate=5.0).requests) == 51  # it has arrivals
    assert [len(read_log([table] * 2, limit=n).requests) for n in (30, 70)] == [30, 70]


@pytest.mark.parametrize(("unit", "seconds"), [(None, 2.5), ("s", 2500.0), ("us", 0.0025)])
def test_times_to_last_token_have_the_unit_of_the_arrivals(
    tmp_path: Path, unit: str | None, seconds: float
) -> None:
    log = tmp_path / "log"
    log.write_text("t,end,input,output\n1790000000000,1790000002500,7,5\n1790000002500,,7,5\n")
    first, second = read_log([log], options=ReadOptions(time_unit=unit)).requests
    assert (first.ttlt_s, second.arrival_s) == pytest.approx((seconds, seconds))


def test_prompts_that_begin_alike_share_their_beginning(tmp_path: Path) -> None:
    system = "You are a careful assistant. " * 40
    asked = {"t": 1, "input_tokens": 300, "output_tokens": 5}
    rows = [asked | {"prompt": f"{system}What is {what}?"} for what in ("rain", "snow")]
    one, other = spans_of(read_log([lines(tmp_path / "log.jsonl", *rows)]).requests)
    assert one[:-1] == other[:-1] != ()
    assert sum(end - first for _, first, end in one) == 300
    assert 200 < sum(end - first for _, first, end in one[:-1]) < 300
    alone = lines(tmp_path / "alone.jsonl", asked | {"prompt": "a" * 1000})  # no other is like it
    assert spans_of(read_log([alone]).requests) == [()]
