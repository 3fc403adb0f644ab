"""The figures that clients see, and runs that must not be counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.engines.server.client import Answer, as_seen, body_of, drive, problem_of
from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.request import SimRequest
from bench.simulator.result import alone_s
from bench.workloads.forced_length import LENGTH_KEY
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from tests.bench.workloads.fingerprint import fingerprint

ALONE_S = partial(alone_s, H800_QWEN3_32B)
REQUEST = SimRequest(
    0.0, 40, 9, 100, LengthDistribution.from_samples([9], "truth"), "any",
    hints=Hints(ttft_slo_ms=1_000, tpot_slo_ms=100, weight=2.0, slo_class="w2"),
)  # fmt: skip


def said(tokens: int, reason: str) -> str:
    meta = f'"completion_tokens": {tokens}, "finish_reason": {reason}'
    return f'{{"meta_info": {{{meta}, "prompt_tokens": 4, "cached_tokens": 3}}}}'


# The status and the events of a server's answer, by prompt.
REPLIES = {
    "right": (200, (said(1, "null"), said(2, '{"type": "stop"}'))),
    "too short": (200, (said(1, '{"type": "stop"}'),)),
    "aborted": (200, (said(1, "null"), said(1, '{"type": "abort"}'))),
    "error in the stream": (200, ('{"error": {"message": "refused"}}',)),
    "silent": (200, ()),
    "refused": (400, ("bad request",)),
    "overloaded": (429, ('{"error": {"code": 429}}',)),
    **{name: (200, (said(0, f'{{"type": "abort", "message": "The request {why}."}}'),))
       for name, why in (
           ("full", "queue is full"), ("outbid", "is aborted by a higher priority request"))},
}  # fmt: skip


class _Stub(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if '"stuck"' in body:
            threading.Event().wait(5.0)
            return
        status, lines = next(REPLIES[prompt] for prompt in REPLIES if f'"{prompt}"' in body)
        self.send_response(status)
        self.end_headers()
        for line in (*lines, "[DONE]"):
            self.wfile.write(f"data: {line}\n\n".encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(url: str, *prompts: str, last_s: float = 0.0, **more: Any) -> list[Answer]:
    """Send all requests at once, but the last one at last_s."""
    arrivals_s = [*[0.0] * (len(prompts) - 1), last_s]
    bodies = [body_of(prompt, 2, 8) for prompt in prompts]
    return drive(url, bodies, arrivals_s, label="test", **more)


def test_a_client_notes_its_tokens_over_time(url: str) -> None:
    follows = {"follows": [None, None, 1], "pauses_s": [0.0, 0.0, 40.0]}
    answers = ask(url, "right", "right", "right", speed=400.0, **follows)
    assert problem_of(answers) == ""
    for answer in answers:
        assert [count for _, count in answer.seen] == [1, 2]
        assert 0 <= answer.sent_s <= answer.first_token_s <= answer.last_token_s
        assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (4, 2, 3)
    first, leads, follows_it = answers
    assert 0 <= first.late_s == first.sent_s
    # A timer may be early by the resolution of a clock.
    assert follows_it.sent_s > leads.last_token_s + 39
    assert follows_it.late_s == pytest.approx(follows_it.sent_s - leads.last_token_s - 40)
    assert follows_it.late_s < 4000  # ten seconds of any host


def test_a_request_has_its_time_from_the_last_arrival_and_from_its_own_sending(url: str) -> None:
    """The server is 10,000 times faster than reality."""
    times = {"last_s": 3000.0, "timeout_s": 1000.0, "speed": 10_000.0}
    answers = ask(url, "stuck", "stuck", follows=[None, 0], pauses_s=[0.0, 0.0], **times)
    sent_s = [answer.sent_s for answer in answers]
    assert sent_s[1] >= 4000
    ends_s = [max(3000.0, each) + 1000 for each in sent_s]
    said = [f"no answer {end_s:.0f} s after the run began" for end_s in ends_s]
    assert [answer.error for answer in answers] == said


def test_a_bad_answer_makes_the_run_invalid(url: str) -> None:
    for prompt, reason in (
        ("too short", "1 tokens came instead of 2"),
        ("aborted", "no answer"),
        ("error in the stream", "refused"),
        ("silent", "no token came"),
        ("refused", "bad request"),
    ):
        problem = problem_of(ask(url, "right", prompt, "right"))
        assert problem.startswith("1 of 3 requests failed")
        assert reason in problem


def test_a_refused_request_counts_as_refused(url: str) -> None:
    answers = ask(url, "overloaded", "full", "outbid", "right")
    assert [answer.is_refused for answer in answers] == [True, True, True, False]
    assert problem_of(answers) == ""
    assert problem_of(answers[:1]) == "all requests were refused"
    seen = as_seen(ALONE_S, [REQUEST] * 4, answers)
    assert seen.metrics()["refused_share"] == 0.75
    assert seen.arrival_s.tolist() == [answers[3].sent_s]


def test_a_body_has_the_common_cap_and_hides_its_length() -> None:
    for wanted, length in ((3, 3), (200, 63)):
        sampling = body_of("a", wanted, 64, session="s")["sampling_params"]
        assert sampling["max_new_tokens"] == 64
        assert sampling["custom_params"] == {LENGTH_KEY: length, "session": "s"}


def test_tokens_of_a_message_count_as_evenly_spread() -> None:
    """Tokens are due at 1.1, 1.2 … 1.8 s. The first five come by 1.4 s, 0.1 s each, and the others
    take 0.2 s each."""
    answer = Answer(10.0, ((11.0, 1), (11.4, 5), (12.2, 9)), 40, 0)
    assert answer.token_s() == pytest.approx([11, 11.1, 11.2, 11.3, 11.4, 11.6, 11.8, 12, 12.2])
    early, late = replace(answer, sent_s=10.01), replace(answer, sent_s=9.99)  # by 0.01 s
    seen = as_seen(ALONE_S, [REQUEST] * 2, [early, late])
    assert seen.num_next_on_time.tolist() == [4, 0]
    assert seen.ttlt_s == pytest.approx([2.19, 2.21])
    assert (seen.alone_s[0], seen.duration_s) == (ALONE_S(40, 9), pytest.approx(12.2 - 9.99))
    metrics = seen.metrics()
    assert metrics["max_itl_ms"] == pytest.approx(200) == metrics["p99_itl_ms"]
    assert fingerprint([*metrics.items()]) == "5c240e0d"
    assert seen.pauses_s == ((), ())
    # Of 5 s for 4 tokens 3.4 s are a pause; of 3 s for 4 tokens only 1.4 s are more than usual.
    blocks = Answer(0.0, ((1.0, 1), (6.0, 5), (9.0, 9), (10.0, 11)))
    assert blocks.pauses_s(0.4) == ((pytest.approx(1.8), pytest.approx(5.2)),)
    assert as_seen(ALONE_S, [REQUEST], [blocks]).pauses_s == (((2.5, 4.5),),)  # usual: 0.75 s
    assert seen.arrived_within(0.0, 0.5).ttlt_s == pytest.approx([2.21])
    assert seen.session_metrics() == {}
    # Both first tokens count once and on time for one; 5 tokens of 18, each for 2.
    assert seen.attainment()["tdg_ratio"] == pytest.approx(5 / 18)
