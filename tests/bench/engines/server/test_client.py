"""What must not be taken for a good run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.engines.server.client import ServedRun, _row, drive
from bench.workloads.forced_length import LENGTH_KEY
from bench.workloads.prompts import WorkloadRequest

GOOD = '{"text": "a b", "meta_info": {"completion_tokens": 2, "prompt_tokens": 4}}'


class _Stub(BaseHTTPRequestHandler):
    """Answers with what the prompt asks for."""

    replies = {  # noqa: RUF012
        "right": (200, GOOD),
        "too short": (200, GOOD.replace("2", "1", 1)),
        "error in the stream": (200, '{"error": {"message": "refused"}}'),
        "refused": (400, "bad request"),
    }

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        prompt = next(prompt for prompt in self.replies if f'"{prompt}"' in body)
        status, reply = self.replies[prompt]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(f"data: {reply}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *arguments: Any) -> None:
        pass


class _Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * len(text.split())


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Stub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(url: str, *prompts: str) -> ServedRun:
    return drive(
        url,
        [WorkloadRequest(prompt, 2, "chat") for prompt in prompts],
        [0.0] * len(prompts),
        tokenizer=_Tokenizer(),
        max_new_tokens=8,
        timeout_s=300.0,
        label="test",
    )


def test_good_answers_are_counted(url: str) -> None:
    result = run(url, "right", "right")
    assert result.problem() == ""
    assert result.metrics["completed"] == 2
    assert all(0 < a.ttft_s <= a.ttlt_s <= result.duration_s for a in result.answers)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("too short", "1 tokens came instead of 2"),
        ("error in the stream", "no token came"),
        ("refused", "bad request"),
    ],
)
def test_a_bad_answer_makes_the_run_invalid(url: str, prompt: str, reason: str) -> None:
    problem = run(url, "right", prompt, "right").problem()
    assert problem.startswith("1 of 3 requests failed")
    assert reason in problem


def test_a_server_that_is_not_there_makes_the_run_invalid() -> None:
    assert "2 of 2" in run("http://127.0.0.1:9", "right", "right").problem()


def test_an_answer_of_the_end_token_alone_is_made_one_longer(url: str) -> None:
    result = drive(
        url,
        [WorkloadRequest("right", 1, "chat")],
        [0.0],
        tokenizer=_Tokenizer(),
        max_new_tokens=8,
        timeout_s=300.0,
        label="test",
    )
    assert result.problem() == ""


def test_a_body_has_the_cap_of_all_and_its_own_length_where_no_scheduler_looks() -> None:
    params = _row(WorkloadRequest("a", 3, "chat"), _Tokenizer(), 64).extra_request_body
    sampling: dict[str, Any] = params["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["custom_params"]) == (64, {LENGTH_KEY: 3})
