"""Requests are preempted on a real server, and their answers stay the same."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.checks.exactness import Spoken, ask, differences
from tests.engine import stage
from tests.engine.conftest import ASKED, Stock
from tests.engine.crowds import Asked, ask_together
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, post, wait_until


def test_a_batch_loses_requests_and_its_predictor(paged: SageServer, stock: Stock) -> None:
    settings(paged, {"schedule_policy": "makespan"})
    paged.predictor_worker().kill()
    aborted: list[str] = []

    def abort(state: dict[str, Any]) -> None:
        aborted.extend([*state["swapped"][:1], *state["running"][:2], *state["fresh"][::2]])
        for rid in aborted:
            post(paged, "/abort_request", {"rid": rid})
        stage.once(paged, num_aborts=len(aborted))

    calls = [
        partial(generate, paged, *one, rid=f"batch {i}.", sampling_params={"ignore_eos": True})
        for i, one in enumerate(ASKED)
    ]
    answers = stage.together(paged, calls, abort, swapped=1)
    assert paged.stats()["num_policy_errors"] == 0
    assert len(aborted) >= 5
    for i, (answer, known) in enumerate(zip(answers, stock, strict=True)):
        if f"batch {i}." in aborted:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert answer["text"] == known.text


@pytest.mark.parametrize("policy", ["makespan", "fastserve"])
def test_answers_stay_and_the_tree_keeps_the_kv(
    paged: SageServer, stock: Stock, policy: str
) -> None:
    settings(paged, {"schedule_policy": policy})
    before = paged.stats()["preemption"]
    num_different, largest = differences(stock, ask_together(paged, ASKED))
    assert num_different == 0
    assert largest < 1e-3
    after = paged.stats()["preemption"]
    counted = ("num_preemptions", "num_resumed", "num_left_in_tree")
    num_preemptions, num_resumed, num_left_in_tree = (after[n] - before[n] for n in counted)
    assert num_resumed > 0
    assert num_left_in_tree > 0
    assert num_preemptions == num_resumed + num_left_in_tree


def counted_alike(
    server: SageServer, asked: Sequence[Asked], counting: Sequence[dict[str, Any]]
) -> tuple[list[Spoken], set[int]]:
    """Check that answers are the same together and one by one. Return them, and the kinds of
    counting that yielded."""
    alone, found = ask(server, asked, 1, counting), ask_together(server, asked, counting)
    assert differences(alone, found)[0] == 0
    retracted = {i % len(counting) for i, answer in enumerate(found) if answer.num_retractions}
    return alone, retracted


def test_counted_tokens_go_on_where_they_were(paged: SageServer, stock: Stock) -> None:
    asked = [(prompt, 60) for prompt, _ in ASKED[:20]]
    counting: list[dict[str, Any]] = [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.5},
        # The first 40 tokens cannot end the answer. After them one token in eight does.
        {"min_new_tokens": 40, "ignore_eos": False, "stop_token_ids": list(range(0, 16384, 8))},
        {},
    ]
    before = paged.stats()["preemption"]
    alone, kinds = counted_alike(paged, asked, counting)
    assert kinds >= set(range(4))
    # A request that counts tokens cannot be computed again. Without host memory it runs on.
    after = paged.stats()["preemption"]
    assert after["num_without_host_room"] > before["num_without_host_room"]
    # Each kind of counting changes answers, so the comparison can fail.
    plain = stock[: len(asked)]
    changed = set()
    for i, (one, other) in enumerate(zip(alone, plain, strict=True)):
        length = min(len(one.ids), len(other.ids))
        if one.ids[:length] != other.ids[:length] or len(one.ids) not in (60, len(other.ids)):
            changed.add(i % 5)
    assert changed == set(range(4))


def test_penalties_that_decide_every_step_go_on(paged: SageServer) -> None:
    # Few tokens are likely.
    likely = {"logit_bias": {str(token): 30.0 for token in range(1, 8)}}
    counting: list[dict[str, Any]] = [
        {name: 1.5, **likely}
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    ]
    asked = [(prompt, 30) for prompt, _ in ASKED[:15]]
    assert counted_alike(paged, asked, counting)[1] == set(range(3))


def test_an_answer_is_the_same_after_preemptions(yielding: SageServer, stock: Stock) -> None:
    before = yielding.preemption()
    num_different, largest = differences(stock, ask_together(yielding, ASKED))
    assert num_different == 0
    assert largest < 1e-3
    after = yielding.preemption()
    num_preemptions = after["num_preemptions"] - before["num_preemptions"]
    assert num_preemptions == after["num_resumed"] - before["num_resumed"] >= len(ASKED)
    assert after["copies_alive"] == 0


def test_a_client_that_leaves_frees_its_copy_only(yielding: SageServer, stock: Stock) -> None:
    before = yielding.preemption()
    clients: dict[str, http.client.HTTPConnection] = {}
    with stage.held(yielding):
        for i, (prompt, num_tokens) in enumerate(ASKED):
            client = http.client.HTTPConnection("127.0.0.1", yielding.port, timeout=300)
            sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
            body = {"text": prompt, "rid": f"client {i}.", "sampling_params": sampling}
            headers = {"Content-Type": "application/json"}
            client.request("POST", "/generate", json.dumps(body | {"stream": True}), headers)
            clients[f"client {i}."] = client
            stage.once(yielding, num_arrived=i + 1)
        stage.hold(yielding, swapped=4)
        state = stage.once_held(yielding)
        groups = [state[name][:4] for name in ("running", "swapped", "fresh")]
        assert all(len(group) == 4 for group in groups)
        gone = [rid for group in groups for rid in group[:2]]
        aborted = [rid for group in groups for rid in group[2:]]
        for rid in gone:
            clients.pop(rid).close()
        for rid in aborted:
            post(yielding, "/abort_request", {"rid": rid})
        stage.once(yielding, num_aborts=len(gone) + len(aborted))
    said = {f"client {i}.": answer.text for i, answer in enumerate(stock)}
    for rid, client in clients.items():
        *_, last, done = client.getresponse().read().strip().split(b"\n\n")
        assert done == b"data: [DONE]"
        answer = json.loads(last[6:])
        if rid in aborted:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert answer["text"] == said[rid]
    after = yielding.preemption()
    came_back = sum(after[name] - before[name] for name in ("num_resumed", "num_recomputed"))
    assert after["num_preemptions"] - before["num_preemptions"] == came_back + len(groups[1])
    generate(yielding, SHORT_PROMPT)  # a server releases its last batch with the next one
    wait_until(lambda: yielding.preemption()["copies_alive"] == 0)


def test_kv_that_a_flush_makes_stale_is_computed_again(yielding: SageServer, stock: Stock) -> None:
    before = yielding.preemption()["num_recomputed"]
    swapped = []

    def flush(state: dict[str, Any]) -> None:
        swapped.extend(state["swapped"])
        post(yielding, "/pause_generation", {"mode": "retract"})
        post(yielding, "/flush_cache", {})
        post(yielding, "/continue_generation", {})

    found = ask_together(yielding, ASKED, then=flush, swapped=4)
    assert differences(stock, found)[0] == 0
    assert yielding.preemption()["num_recomputed"] - before == len(swapped) >= 4
