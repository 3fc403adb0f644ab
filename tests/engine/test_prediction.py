"""Each way into the server: the prediction, its text, and the record."""

from __future__ import annotations

import json
import os
import signal
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


@pytest.mark.parametrize("stream", [False, True])
def test_generate(sage_server: SageServer, stream: bool) -> None:
    before = num_on_disk(sage_server)
    body = {"text": SHORT_PROMPT, "sampling_params": {"max_new_tokens": 3}, "stream": stream}
    response = post(sage_server, "/generate", body)
    if stream:
        chunks = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert chunks[-1] == "[DONE]"
        assert json.loads(chunks[-2])["meta_info"]["completion_tokens"] == 3
    assert recorded(sage_server, 1, before) == [(SHORT_PROMPT, 3, True)]


def test_a_batch_is_predicted_one_by_one(sage_server: SageServer) -> None:
    before = num_on_disk(sage_server)
    answers = generate(sage_server, [SHORT_PROMPT, LONG_PROMPT], max_new_tokens=2)
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 2]
    news = recorded(sage_server, 2, before)
    assert {prompt for prompt, _, _ in news} == {SHORT_PROMPT, LONG_PROMPT}


def test_n_samples_are_n_records_and_the_prefix_request_is_none(sage_server: SageServer) -> None:
    before = num_on_disk(sage_server)
    generate(sage_server, SHORT_PROMPT, max_new_tokens=2, sampling_params={"n": 3})
    assert recorded(sage_server, 3, before) == [(SHORT_PROMPT, 2, True)] * 3


def test_token_ids_alone_are_read_as_text(sage_server: SageServer, model: Path) -> None:
    before = num_on_disk(sage_server)
    ids = load_tokenizer(str(model))(LONG_PROMPT)["input_ids"]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}
    post(sage_server, "/generate", body)
    ((prompt, _, _),) = recorded(sage_server, 1, before)
    assert prompt == LONG_PROMPT


@pytest.mark.parametrize("n", [1, 2])
def test_chat_embeds_the_last_user_message_not_the_template(
    sage_server: SageServer, n: int
) -> None:
    before = num_on_disk(sage_server)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": LONG_PROMPT},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": [{"type": "text", "text": SHORT_PROMPT}]},
    ]
    post(sage_server, "/v1/chat/completions", {"messages": messages, "max_tokens": 2, "n": n})
    assert recorded(sage_server, n, before) == [(SHORT_PROMPT, 2, True)] * n


def test_responses_embed_what_the_user_said_too(sage_server: SageServer) -> None:
    before = num_on_disk(sage_server)
    served = requests.get(sage_server.url + "/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": served, "input": SHORT_PROMPT, "max_output_tokens": 9}
    post(sage_server, "/v1/responses", {**body, "instructions": LONG_PROMPT * 20})
    post(sage_server, "/v1/responses", {**body, "stream": True, "instructions": LONG_PROMPT * 20})
    assert [prompt for prompt, _, _ in recorded(sage_server, 2, before)] == [SHORT_PROMPT] * 2


@pytest.mark.parametrize(
    "media", [{}, {"image_data": "x"}, {"image_data": ""}, {"audio_data": "x"}]
)
def test_a_token_that_the_model_does_not_have_is_refused(
    sage_server: SageServer, media: dict[str, str]
) -> None:
    """It would end the scheduler. A model of text does not read media."""
    body = {"input_ids": [5, 10**9], "sampling_params": {"max_new_tokens": 2}, **media}
    answer = requests.post(sage_server.url + "/generate", json=body, timeout=300)
    assert (answer.status_code, "input_ids have 1000000000" in answer.text) == (400, True)
    generate(sage_server, SHORT_PROMPT)


def test_completions(sage_server: SageServer) -> None:
    before = num_on_disk(sage_server)
    post(sage_server, "/v1/completions", {"prompt": [SHORT_PROMPT, LONG_PROMPT], "max_tokens": 2})
    assert {prompt for prompt, _, _ in recorded(sage_server, 2, before)} == {
        SHORT_PROMPT,
        LONG_PROMPT,
    }


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


def test_an_abort_that_comes_while_the_prediction_is_awaited_is_not_lost(
    sage_server: SageServer,
) -> None:
    asked: dict[str, dict[str, Any]] = {
        "one": {"prompt": SHORT_PROMPT, "rid": "one"},
        "batch": {"prompt": [SHORT_PROMPT, LONG_PROMPT], "rid": ["batch-0", "batch-1"]},
        "samples": {"prompt": SHORT_PROMPT, "rid": "samples", "sampling_params": {"n": 3}},
        "by all": {"prompt": LONG_PROMPT, "rid": "by-all"},
    }

    def call(what: dict[str, Any]) -> list[Any]:
        answers = generate(sage_server, max_new_tokens=200, **what)
        return answers if isinstance(answers, list) else [answers]

    def abort(**body: Any) -> None:
        post(sage_server, "/abort_request", body)

    worker = psutil.Process(worker_pid(sage_server))
    worker.suspend()
    try:
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = {name: pool.submit(call, what) for name, what in asked.items()}
            wait_until(lambda: sage_server.stats()["predictor"]["num_awaited"] == 5)
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


@pytest.mark.parametrize(
    ("prompt", "forged"),
    [
        (
            "zxq vvk 8814 ##",
            {"__sage_lengths": [1], "__sage_weights": [1.0], "__sage_effective_samples": 9.0},
        ),
        ("SELECT owner FROM pets;", {"__sage_lengths": {"a": 1}}),
        ("Sieben Zwerge im Wald", {"__sage_lengths": "junk", "__sage_source": None}),
    ],
)
def test_what_a_client_forges_is_dropped_at_the_door(
    sage_server: SageServer, prompt: str, forged: dict[str, Any]
) -> None:
    before = sage_server.stats()["num_ranked"]
    forged = {"__sage_source": "truth", **forged}
    sampling = {"custom_params": forged}
    # No predictor knows the truth, so only the client can have said so.
    generate(sage_server, prompt, sampling_params=sampling)
    generate(sage_server, [prompt] * 2, sampling_params={**sampling, "n": 2})
    after = sage_server.stats()
    assert sum(after["num_ranked"].values()) == sum(before.values()) + 1 + 2 + 4
    assert "truth" not in after["num_ranked"]
    assert after["num_malformed"] == 0


def test_no_route_takes_what_a_client_forges(sage_server: SageServer) -> None:
    lengths = {"__sage_lengths": [1], "__sage_weights": [1.0], "__sage_effective_samples": 9.0}
    forged = {"custom_params": {"__sage_source": "truth", **lengths}}
    said = [{"role": "user", "content": SHORT_PROMPT}]
    body = {"capacity_of_str_len": 1000}
    session = requests.post(sage_server.url + "/open_session", json=body, timeout=60).json()
    served = requests.get(sage_server.url + "/v1/models", timeout=60).json()["data"][0]["id"]
    routes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": said, "max_tokens": 2, **forged}),
        ("/v1/completions", {"prompt": [SHORT_PROMPT] * 2, "max_tokens": 2, **forged}),
        ("/v1/responses", {"input": SHORT_PROMPT, "max_output_tokens": 2, **forged}),
        ("/v1/messages", {"messages": said, "max_tokens": 2, **forged}),
        (
            "/generate",
            {
                "text": SHORT_PROMPT,
                "session_params": {"id": session},
                "sampling_params": {"max_new_tokens": 2, **forged},
            },
        ),
    ]
    for path, body in routes:
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


def test_requests_with_short_predictions_enter_and_survive_long_answers(
    sage_server: SageServer,
) -> None:
    # SGLang reserves the whole cap of a new request, and admits two of these. Their predictions
    # are 5 to 7 tokens each.
    asked = [(f"{SHORT_PROMPT} Case {i}.", 250) for i in range(6)]
    unbounded = [{"ignore_eos": False}]
    running = []
    together = ask_together(
        sage_server, asked, unbounded, then=lambda state: running.extend(state["running"]), tokens=3
    )
    assert len(running) == len(asked)
    # They become 40 times as long as predicted, and then the pool is too small for all of them.
    assert sum(answer.num_retractions for answer in together) > 0
    assert differences(ask(sage_server, asked[:3], 1, sampling=unbounded), together[:3])[0] == 0


def test_tokens_served_are_counted_once(sage_server: SageServer) -> None:
    before = sage_server.stats()["served_tokens"]
    answer = generate(sage_server, LONG_PROMPT + " And then?", 60)["meta_info"]
    served = sage_server.stats()["served_tokens"] - before
    prefilled = answer["prompt_tokens"] - answer["cached_tokens"]
    # The first token comes with the prefill; with overlap, a step more is under way at the end.
    assert prefilled + 59 <= served <= prefilled + 62


def worker_pid(server: SageServer) -> int:
    assert server.pid is not None
    for process in psutil.Process(server.pid).children(recursive=True):
        if "predictor_store.service.worker_process" in process.cmdline():
            return process.pid
    raise AssertionError("the server has no prediction worker")


def test_a_killed_embedding_worker_costs_order_not_service(sage_server: SageServer) -> None:
    before = sage_server.stats()["predictor"]
    os.kill(worker_pid(sage_server), signal.SIGKILL)
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
    worker = psutil.Process(worker_pid(sage_server))
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


def test_a_second_server_on_the_same_store_is_told_who_holds_it(
    sage_server: SageServer, model: Path, tmp_path: Path
) -> None:
    second = SageServer(model, tmp_path, sage_server.store)
    with pytest.raises(RuntimeError, match=str(worker_pid(sage_server))), second:
        pass
