"""Each way into the server: the prediction, its text, and the record."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
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
    UNASKED_LONG_PROMPT,
    UNASKED_SHORT_PROMPT,
    WARM_UP,
    SageServer,
    generate,
    wait_until,
)


@pytest.fixture
def sage_server(foreseeing: SageServer) -> SageServer:
    return foreseeing


def post(server: SageServer, path: str, body: dict[str, Any]) -> Any:
    response = requests.post(server.url + path, json={"model": "any", **body}, timeout=300)
    response.raise_for_status()
    return response


def num_on_disk(server: SageServer) -> int:
    """Records on disk, once those of all requests that have ended are among them.

    An answer is heard before its record is written; records are written in the order in which
    their requests ended.
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


def test_the_servers_own_requests_leave_no_trace(sage_server: SageServer) -> None:
    info = requests.get(sage_server.url + "/server_info", timeout=300).json()
    assert info["schedule_policy"] == "sage"
    before, num_predicted = num_on_disk(sage_server), _num_predicted(sage_server)
    assert requests.get(sage_server.url + "/health_generate", timeout=300).status_code == 200
    generate(sage_server, SHORT_PROMPT)
    recorded(sage_server, 1, before)
    assert _num_predicted(sage_server) == num_predicted + 1
    assert not any(prompt in ("", WARM_UP) for prompt, _, _ in sage_server.history())


def _num_predicted(server: SageServer) -> int:
    predictor = server.stats()["predictor"]
    return sum(n for name, n in predictor.items() if name.startswith("num_predicted_"))


SAMPLING = {"max_new_tokens": 2}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": LONG_PROMPT},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": [{"type": "text", "text": SHORT_PROMPT}]},
]
BOTH = [SHORT_PROMPT, LONG_PROMPT]
# Route and body, and the prompts of the records that come of it.
ROUTES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/generate", {"text": SHORT_PROMPT, "sampling_params": SAMPLING}, [SHORT_PROMPT]),
    ("/generate", {"text": SHORT_PROMPT, "sampling_params": SAMPLING, "stream": True},
     [SHORT_PROMPT]),
    ("/generate", {"text": BOTH, "sampling_params": SAMPLING}, BOTH),
    # The request that computes the prefix of the samples leaves no record.
    ("/generate", {"text": SHORT_PROMPT, "sampling_params": {**SAMPLING, "n": 3}},
     [SHORT_PROMPT] * 3),
    ("/v1/completions", {"prompt": BOTH, "max_tokens": 2}, BOTH),
    # The last message of the user counts, not the template.
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}, [SHORT_PROMPT]),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, "n": 2}, [SHORT_PROMPT] * 2),
    # SGLang keeps two tokens of this cap for itself.
    ("/v1/responses", {"input": SHORT_PROMPT, "max_output_tokens": 4,
                       "instructions": LONG_PROMPT * 20}, [SHORT_PROMPT]),
    ("/v1/responses", {"input": SHORT_PROMPT, "max_output_tokens": 4, "stream": True,
                       "instructions": LONG_PROMPT * 20}, [SHORT_PROMPT]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "prompts"), ROUTES)
def test_each_answer_is_a_record(
    sage_server: SageServer, path: str, body: dict[str, Any], prompts: list[str]
) -> None:
    before = num_on_disk(sage_server)
    served = requests.get(sage_server.url + "/v1/models", timeout=60).json()["data"][0]["id"]
    post(sage_server, path, {"model": served, **body})
    found = recorded(sage_server, len(prompts), before)
    assert sorted(found) == sorted((prompt, 2, True) for prompt in prompts)


def test_token_ids_alone_are_read_as_text(sage_server: SageServer, model: Path) -> None:
    before = num_on_disk(sage_server)
    ids = load_tokenizer(str(model))(LONG_PROMPT)["input_ids"]
    post(sage_server, "/generate", {"input_ids": ids, "sampling_params": SAMPLING})
    assert recorded(sage_server, 1, before) == [(LONG_PROMPT, 2, True)]


def test_a_token_that_the_model_does_not_have_is_refused(sage_server: SageServer) -> None:
    """It would end the scheduler."""
    for media in ({}, {"image_data": "x"}, {"image_data": ""}, {"audio_data": "x"}):
        body = {"input_ids": [5, 10**9], "sampling_params": SAMPLING, **media}
        answer = requests.post(sage_server.url + "/generate", json=body, timeout=300)
        assert (answer.status_code, "input_ids have 1000000000" in answer.text) == (400, True)
    generate(sage_server, SHORT_PROMPT)


def test_an_answer_that_ends_by_itself_is_not_censored(sage_server: SageServer) -> None:
    before = num_on_disk(sage_server)
    first = generate(sage_server, SHORT_PROMPT, max_new_tokens=3)
    stop = {"stop_token_ids": [first["output_ids"][1]]}
    generate(sage_server, SHORT_PROMPT, max_new_tokens=3, sampling_params=stop)
    assert recorded(sage_server, 2, before)[1] == (SHORT_PROMPT, 2, False)


def test_of_a_long_answer_the_history_hears_before_its_end(sage_server: SageServer) -> None:
    before = sage_server.stats()["predictor"]["num_going_on"]
    generate(sage_server, SHORT_PROMPT, max_new_tokens=200)
    wait_until(lambda: sage_server.stats()["predictor"]["num_going_on"] > before)


def test_an_aborted_answer_was_longer_than_that(sage_server: SageServer) -> None:
    before = num_on_disk(sage_server)
    body = {"text": SHORT_PROMPT, "sampling_params": {"max_new_tokens": 700}, "stream": True}
    with stage.held(sage_server, tokens=5):
        with requests.post(sage_server.url + "/generate", json=body, stream=True, timeout=300):
            stage.once_held(sage_server)
        stage.once_aborted(sage_server, 1)
    ((prompt, num_tokens, censored),) = recorded(sage_server, 1, before)
    assert (prompt, censored) == (SHORT_PROMPT, True)
    assert 5 <= num_tokens <= 7  # with overlap, a step is under way where it waits


def test_an_abort_during_the_prediction_is_not_lost(sage_server: SageServer) -> None:
    asked: dict[str, dict[str, Any]] = {
        "one": {"prompt": SHORT_PROMPT, "rid": "one"},
        "batch": {"prompt": [SHORT_PROMPT, LONG_PROMPT], "rid": ["batch-0", "batch-1"]},
        "samples": {"prompt": SHORT_PROMPT, "rid": "samples", "sampling_params": {"n": 3}},
        "by all": {"prompt": [LONG_PROMPT, SHORT_PROMPT], "rid": ["by-all-0", "by-all-1"]},
    }

    def call(what: dict[str, Any]) -> list[Any]:
        answers = generate(sage_server, max_new_tokens=200, **what)
        return answers if isinstance(answers, list) else [answers]

    def abort(**body: Any) -> None:
        post(sage_server, "/abort_request", body)

    worker = sage_server.predictor_worker()
    worker.suspend()
    try:
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = {name: pool.submit(call, what) for name, what in asked.items()}
            wait_until(lambda: sage_server.stats()["predictor"]["num_awaited"] == 6)
            for rid in ("one", "batch-0", "batch-1", "samples"):
                abort(rid=rid)
            abort(abort_all=True)
            worker.resume()
    finally:
        worker.resume()
    for name, told in answers.items():
        for answer in told.result():
            meta = answer["meta_info"]
            assert (name, meta["finish_reason"]["type"]) == (name, "abort")
            assert meta["completion_tokens"] <= 1
    generate(sage_server, SHORT_PROMPT)


def test_no_route_takes_what_a_client_forges(sage_server: SageServer) -> None:
    """No predictor knows the truth, so only the client can have claimed it."""
    lengths = {"__sage_lengths": [1], "__sage_weights": [1.0], "__sage_effective_samples": 9.0}
    forged = {"custom_params": {"__sage_source": "truth", **lengths}}
    junk = {"custom_params": {"__sage_source": "truth", "__sage_lengths": "junk"}}
    body = {"capacity_of_str_len": 1000}
    session = requests.post(sage_server.url + "/open_session", json=body, timeout=60).json()
    served = requests.get(sage_server.url + "/v1/models", timeout=60).json()["data"][0]["id"]
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, **forged}),
        ("/v1/completions", {"prompt": BOTH, "max_tokens": 2, **forged}),
        ("/v1/responses", {"input": SHORT_PROMPT, "max_output_tokens": 2, **forged}),
        ("/v1/messages", {"messages": CHAT[1:], "max_tokens": 2, **forged}),
        ("/generate", {"text": BOTH, "sampling_params": {**SAMPLING, **junk, "n": 2}}),
        ("/generate", {"text": SHORT_PROMPT, "session_params": {"id": session},
                       "sampling_params": {**SAMPLING, **forged}}),
    ):  # fmt: skip
        post(sage_server, path, {"model": served, **body})
    after = sage_server.stats()
    assert "truth" not in after["num_ranked"]
    assert after["num_malformed"] == 0


def test_the_queue_goes_by_prediction_not_by_arrival(sage_server: SageServer) -> None:
    # All are there before the first may start, all have the same cap, and none has a twin.
    asked = {
        "long 1": f"1. {UNASKED_LONG_PROMPT}",
        "long 2": f"2. {UNASKED_LONG_PROMPT}",
        "short 1": f"3. {UNASKED_SHORT_PROMPT}",
        "short 2": f"4. {UNASKED_SHORT_PROMPT}",
    }
    stage.together(
        sage_server,
        [partial(generate, sage_server, prompt, 20, rid=rid) for rid, prompt in asked.items()],
    )
    started = stage.started(sage_server)
    # Which of the two short requests has the shorter prediction depends on earlier requests.
    assert [rid.split()[0] for rid in started] == ["short", "short", "long", "long"]


def test_short_predictions_admit_more_and_survive_long_answers(sage_server: SageServer) -> None:
    # SGLang reserves the whole cap of a new request, and admits two of these. Their predictions
    # are 5 to 7 tokens each.
    asked = [(f"{SHORT_PROMPT} Case {i}.", 250) for i in range(6)]
    unbounded = [{"ignore_eos": False}]
    running = []
    together = ask_together(
        sage_server, asked, unbounded, then=lambda state: running.extend(state["running"]), tokens=3
    )
    assert len(running) == len(asked)
    # Answers become 40 times as long as predicted, so the pool is too small for all.
    assert sum(answer.num_retractions for answer in together) > 0
    assert differences(ask(sage_server, asked[:3], 1, sampling=unbounded), together[:3])[0] == 0


def test_tokens_served_are_counted_once(sage_server: SageServer) -> None:
    before = sage_server.stats()["served_tokens"]
    answer = generate(sage_server, LONG_PROMPT + " And then?", 60)["meta_info"]
    served = sage_server.stats()["served_tokens"] - before
    prefilled = answer["prompt_tokens"] - answer["cached_tokens"]
    # The first token comes with the prefill; with overlap, a step more is under way at the end.
    assert prefilled + 59 <= served <= prefilled + 62


def test_a_killed_embedding_worker_costs_order_not_service(sage_server: SageServer) -> None:
    before = sage_server.stats()["predictor"]
    sage_server.predictor_worker().kill()
    with ThreadPoolExecutor(8) as pool:
        prompts = [SHORT_PROMPT, LONG_PROMPT] * 4
        answers = list(pool.map(lambda prompt: generate(sage_server, prompt), prompts))
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [4] * 8

    wait_until(lambda: sage_server.stats()["predictor"]["worker_alive"] == 1)
    assert sage_server.stats()["predictor"]["num_worker_restarts"] == 1
    num_on_disk(sage_server)  # what ends from now on is recorded
    assert sage_server.stats()["num_policy_errors"] == 0
    assert before["num_worker_restarts"] == 0


def test_a_full_disk_delays_writing_and_nothing_else(sage_server: SageServer) -> None:
    worker = sage_server.predictor_worker()
    before = num_on_disk(sage_server)
    soft, hard = worker.rlimit(psutil.RLIMIT_FSIZE)
    worker.rlimit(psutil.RLIMIT_FSIZE, (1024, hard))
    try:
        for _ in range(3):
            generate(sage_server, SHORT_PROMPT, max_new_tokens=2)
        wait_until(lambda: sage_server.stats()["predictor"]["num_unwritten"] == 3)
        assert len(sage_server.history()) == before
    finally:
        worker.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))
    assert recorded(sage_server, 3, before) == [(SHORT_PROMPT, 2, True)] * 3
    assert worker.is_running()


def test_a_store_in_use_is_refused(sage_server: SageServer, model: Path, tmp_path: Path) -> None:
    second = SageServer(model, tmp_path, sage_server.store)
    with pytest.raises(RuntimeError, match=str(sage_server.predictor_worker().pid)), second:
        pass
