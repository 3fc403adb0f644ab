"""Each way into the server: the prediction, its text, and the record."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from predictor_store.data.warm import load_tokenizer
from tests.checks.exactness import ask, differences
from tests.engine import stage
from tests.engine.crowds import ask_together
from tests.engine.serving import (
    LONG_PROMPT,
    MARKER,
    SHORT_PROMPT,
    WARM_UP,
    SageServer,
    generate,
    post,
    wait_until,
)


@pytest.fixture
def server(foreseeing: SageServer) -> SageServer:
    return foreseeing


def num_on_disk(server: SageServer) -> int:
    """Records on disk, once those of all requests that have ended are among them.

    An answer arrives before its record is written. Records are written in the order in which their
    requests ended.
    """

    def num_markers() -> int:
        return sum(prompt == MARKER for prompt, _, _ in server.history())

    before = num_markers()
    generate(server, MARKER, max_new_tokens=1)
    wait_until(lambda: num_markers() > before)
    return len(server.history())


def recorded(server: SageServer, num_expected: int, num_before: int) -> list[tuple[str, int, bool]]:
    """Return the records after the first num_before, once all are on disk."""
    wait_until(lambda: len(server.history()) >= num_before + num_expected)
    news = server.history()[num_before:]
    assert len(news) == num_expected
    return news


def num_predicted(server: SageServer) -> int:
    predictor = server.stats()["predictor"]
    return sum(n for name, n in predictor.items() if name.startswith("num_predicted_"))


def test_the_servers_own_requests_leave_no_trace(server: SageServer) -> None:
    before, predicted_before = num_on_disk(server), num_predicted(server)
    assert requests.get(server.url + "/health_generate", timeout=300).status_code == 200
    generate(server, SHORT_PROMPT)
    recorded(server, 1, before)
    assert num_predicted(server) == predicted_before + 1
    assert not any(prompt in ("", WARM_UP) for prompt, _, _ in server.history())


# No predictor knows the truth, so only the client can have claimed it.
FORGED = {
    "custom_params": {
        "__sage_source": "truth", "__sage_lengths": [1], "__sage_weights": [1.0],
        "__sage_effective_samples": 9.0,
    }
}  # fmt: skip
SAMPLING = {"max_new_tokens": 2, **FORGED}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": LONG_PROMPT},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": [{"type": "text", "text": SHORT_PROMPT}]},
]
ONE = {"text": SHORT_PROMPT, "sampling_params": SAMPLING}
BOTH = [SHORT_PROMPT, LONG_PROMPT]
# SGLang keeps two tokens of this cap for itself.
RESPONSE = {
    "input": SHORT_PROMPT, "max_output_tokens": 4, "instructions": LONG_PROMPT * 20
}  # fmt: skip
# Route and body, and the prompts of the records that come of it.
ROUTES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/generate", ONE, [SHORT_PROMPT]),
    ("/generate", ONE | {"stream": True}, [SHORT_PROMPT]),
    ("/generate", ONE | {"text": BOTH}, BOTH),
    # Read as text.
    ("/generate", {"input_ids": LONG_PROMPT, "sampling_params": SAMPLING}, [LONG_PROMPT]),
    # The request that computes the prefix of the samples leaves no record.
    ("/generate", ONE | {"sampling_params": {**SAMPLING, "n": 3}}, [SHORT_PROMPT] * 3),
    ("/v1/completions", {"prompt": BOTH, "max_tokens": 2}, BOTH),
    # The last message of the user counts, not the template.
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "n": 2}, [SHORT_PROMPT] * 2),
    ("/v1/messages", {"messages": CHAT[1:], "max_tokens": 2}, [SHORT_PROMPT]),
    ("/v1/responses", RESPONSE, [SHORT_PROMPT]),
    ("/v1/responses", RESPONSE | {"stream": True}, [SHORT_PROMPT]),
]


@pytest.mark.parametrize(("path", "body", "prompts"), ROUTES)
def test_each_answer_is_a_record_and_no_forged_prediction_counts(
    server: SageServer, model: Path, path: str, body: dict[str, Any], prompts: list[str]
) -> None:
    before = num_on_disk(server)
    if "input_ids" in body:
        body = body | {"input_ids": load_tokenizer(str(model))(body["input_ids"])["input_ids"]}
    forged = {} if path == "/generate" else FORGED
    post(server, path, {"model": str(model), **forged, **body})
    found = recorded(server, len(prompts), before)
    assert sorted(found) == sorted((prompt, 2, True) for prompt in prompts)
    stats = server.stats()
    assert ("truth" in stats["num_predicted"], stats["num_malformed"]) == (False, 0)


def test_a_token_beyond_the_vocabulary_is_refused(server: SageServer) -> None:
    """It would end the scheduler."""
    for media in ({}, {"image_data": "x"}, {"audio_data": "x"}):
        body = {"input_ids": [5, 10**9], "sampling_params": SAMPLING, **media}
        answer = requests.post(server.url + "/generate", json=body, timeout=300)
        assert (answer.status_code, "input_ids have 1000000000" in answer.text) == (400, True)
    generate(server, SHORT_PROMPT)


def test_an_aborted_answer_is_a_censored_record(server: SageServer) -> None:
    before = num_on_disk(server)
    body = {"text": SHORT_PROMPT, "sampling_params": {"max_new_tokens": 700}, "stream": True}
    with stage.held(server, tokens=5):
        with requests.post(server.url + "/generate", json=body, stream=True, timeout=300):
            stage.once_held(server)
        stage.once(server, num_aborts=1)
    ((prompt, num_tokens, censored),) = recorded(server, 1, before)
    assert (prompt, censored) == (SHORT_PROMPT, True)
    assert 5 <= num_tokens <= 7  # with overlap, a step is in flight while it waits


def test_an_abort_during_the_prediction_is_not_lost(server: SageServer) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": SHORT_PROMPT, "rid": "one"},
        {"prompt": BOTH, "rid": ["batch-0", "batch-1"]},
        {"prompt": SHORT_PROMPT, "rid": "samples", "sampling_params": {"n": 3}},
        {"prompt": BOTH, "rid": ["by-all-0", "by-all-1"]},
    ]
    with ThreadPoolExecutor(len(asked)) as pool, server.without_predictions():
        calls = [pool.submit(generate, server, max_new_tokens=200, **one) for one in asked]
        wait_until(lambda: server.stats()["predictor"]["num_awaited"] == 6)
        for rid in ("one", "batch-0", "batch-1", "samples"):
            post(server, "/abort_request", {"rid": rid})
        post(server, "/abort_request", {"abort_all": True})
    for call, one in zip(calls, asked, strict=True):
        answers = call.result()
        for answer in answers if isinstance(answers, list) else [answers]:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort", one
            assert answer["meta_info"]["completion_tokens"] <= 1, one


def test_short_predictions_admit_more_and_survive_long_answers(server: SageServer) -> None:
    # SGLang reserves the whole cap of a new request, and admits two of these. Their predictions
    # are 5 to 7 tokens each.
    asked = [(f"{SHORT_PROMPT} Case {i}.", 250) for i in range(6)]
    unbounded = [{"ignore_eos": False}]
    running = []
    together = ask_together(
        server, asked, unbounded, then=lambda state: running.extend(state["running"]), tokens=3
    )
    assert len(running) == len(asked)
    # Answers become 40 times longer than predicted, so the pool is too small for all.
    assert sum(answer.num_retractions for answer in together) > 0
    assert differences(ask(server, asked[:3], 1, sampling=unbounded), together[:3])[0] == 0


def test_a_killed_predictor_costs_order_not_service(server: SageServer) -> None:
    before = server.stats()["predictor"]["num_worker_restarts"]
    server.predictor_worker().kill()
    answers = generate(server, BOTH * 4)
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [4] * 8
    wait_until(lambda: server.stats()["predictor"]["worker_alive"] == 1)
    assert server.stats()["predictor"]["num_worker_restarts"] == before + 1
    num_on_disk(server)  # requests that end from now on are recorded
    assert server.stats()["num_policy_errors"] == 0
