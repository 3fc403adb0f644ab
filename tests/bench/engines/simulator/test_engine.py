"""One simulated engine, on cases that can be worked out by hand, and on mixed traffic."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.engines.simulator import executor
from bench.engines.simulator.node import Node
from bench.engines.simulator.presets import PRESETS, Engine
from bench.engines.simulator.request import Progress, SimRequest
from bench.engines.simulator.result import Result, alone_s
from bench.engines.simulator.run import make_node, simulate
from bench.engines.simulator.state import Options
from bench.engines.simulator.stock import STOCK
from sage_sched.config import DecodeConfig, SageConfig
from sage_sched.job import NO_HINTS, Hints
from sage_sched.plan import Enter, Plan, Way, Yield
from sage_sched.registry import policy_names
from sage_sched.steps import attended_pairs
from tests.bench.engines.simulator.invariants import watch
from tests.bench.engines.simulator.traffic import (
    MANY_SLOTS,
    SMALL,
    STEP_TIME,
    burst,
    mixed,
    request,
)

pytestmark = pytest.mark.slow

ROOMY = replace(SMALL, kv_pool_tokens=65536, page_size=1, max_prefill_tokens=8192)
CHECKED = Options(watch=watch)
PREEMPTIVE = Options(preempt=True, watch=watch)
CONFIG = SageConfig()


def arrays(result: Result) -> dict[str, Any]:
    """All but the wall seconds, comparable."""
    numbers = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    del numbers["wall_s"]
    return {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in numbers.items()}


def decode_s(num_requests: int, context_tokens: int) -> float:
    return STEP_TIME.decode_s(num_requests, context_tokens)


def test_one_request_alone() -> None:
    result = simulate(ROOMY, "fcfs", CONFIG, [request(1.0, 100, 4)], CHECKED)
    prefill_s = STEP_TIME.prefill_s(1, 100, attended_pairs(0, 100))
    assert result.ttft_s[0] == pytest.approx(prefill_s)
    rest_s = decode_s(1, 101) + decode_s(1, 102) + decode_s(1, 103)
    assert result.ttlt_s[0] == pytest.approx(prefill_s + rest_s)
    assert result.alone_s[0] == pytest.approx(result.ttlt_s[0])
    assert result.metrics()["largest_slowdown"] == pytest.approx(1.0)


def test_a_long_prompt_is_prefilled_in_chunks_before_anyone_decodes() -> None:
    requests = [request(0.0, 50, 10), request(0.01, 1200, 1)]  # 512 + 512 + 176
    result = simulate(ROOMY, "fcfs", CONFIG, requests, CHECKED)
    first_s = STEP_TIME.prefill_s(1, 50, attended_pairs(0, 50))  # the other comes meanwhile
    chunks = ((0, 512), (512, 512), (1024, 176))
    chunks_s = sum(STEP_TIME.prefill_s(1, n, attended_pairs(done, n)) for done, n in chunks)
    assert result.ttft_s[1] + 0.01 == pytest.approx(first_s + chunks_s)
    steps_s = sum(decode_s(1, 51 + i) for i in range(9))
    assert result.ttlt_s[0] == pytest.approx(first_s + chunks_s + steps_s)
    assert alone_s(ROOMY, 1200, 1) == pytest.approx(chunks_s)


def test_an_arrival_is_seen_at_the_end_of_the_step() -> None:
    first_s = STEP_TIME.prefill_s(1, 50, attended_pairs(0, 50))
    seen_s = first_s + decode_s(1, 51) + decode_s(1, 52)
    requests = [request(0.0, 50, 10), request(seen_s - 0.001, 30, 1)]
    result = simulate(ROOMY, "fcfs", CONFIG, requests, CHECKED)
    own_s = STEP_TIME.prefill_s(1, 30, attended_pairs(0, 30))
    assert requests[1].arrival_s + result.ttft_s[1] == pytest.approx(seen_s + own_s)


def test_admission_sets_the_cap_aside() -> None:
    # 2 x (100 + 400 + 1) tokens and more: the second does not fit beside the first within a pass.
    engine = replace(ROOMY, kv_pool_tokens=1001)
    requests = [request(0.0, 100, 3), request(0.0, 100, 1)]
    together = simulate(engine, "fcfs", CONFIG, requests, CHECKED)
    own_s = STEP_TIME.prefill_s(1, 100, attended_pairs(0, 100))
    # In the next pass the first counts with 0.7 of its cap only: nothing ran before it, so that it
    # became the running batch, with a flag of its own.
    assert together.ttft_s[1] == pytest.approx(own_s * 2)
    roomier = replace(engine, kv_pool_tokens=1003)
    assert simulate(roomier, "fcfs", CONFIG, requests, CHECKED).ttft_s[1] < own_s * 2
    tighter = replace(engine, kv_pool_tokens=880)  # 100 + 0.7 * 399 + 501 and one less
    waited = simulate(tighter, "fcfs", CONFIG, requests, CHECKED)
    assert waited.ttft_s[1] == pytest.approx(waited.ttlt_s[0] + own_s)


def test_a_full_batch_stays_so_until_a_request_leaves() -> None:
    # Beside the first two the third does not fit at once (1380 - 100 - 0.7 * 399 - 501 < 501). As
    # they run, SGLang comes to expect less of them, but it does not ask again.
    engine = replace(ROOMY, kv_pool_tokens=1380)
    requests = [request(0.0, 100, 380), request(0.001, 100, 380), request(0.002, 100, 1)]
    result = simulate(engine, "fcfs", CONFIG, requests, CHECKED)
    assert result.ttft_s[1] < 0.1
    assert result.ttlt_s[2] > min(result.ttlt_s[:2])


def test_an_unfinished_prompt_that_leaves_the_batch_opens_it() -> None:
    finished: list[Progress] = []
    node = make_node(ROOMY, "fcfs", CONFIG, CHECKED, finished.append)
    node.submit(request(0.0, 50, 300), 0)
    node.submit(request(0.001, 1300, 2), 1)
    while node.state.chunked is None:
        node.advance(math.nextafter(node.now_s, math.inf))
    assert len(node.state.decode) == 1
    node.state.batch_is_full = True
    node.advance(math.nextafter(node.now_s, math.inf))
    assert node.state.chunked is not None
    assert not node.state.batch_is_full


def test_a_short_prompt_gets_in_beside_the_next_chunk_of_a_long_one() -> None:
    # The long prompt takes three steps of 512 tokens; the short one comes in the first.
    requests = [request(0.0, 1300, 2), request(0.001, 10, 2)]
    result = simulate(ROOMY, "srpt-oracle", CONFIG, requests, CHECKED)
    parts = [(0, 512), (512, 502)]
    steps_s = [STEP_TIME.prefill_s(1, n, attended_pairs(done, n)) for done, n in parts]
    short_s = STEP_TIME.prefill_s(1, 10, attended_pairs(0, 10)) - STEP_TIME.prefill_base_s
    assert result.ttft_s[1] + 0.001 == pytest.approx(sum(steps_s) + short_s)
    first_come = simulate(ROOMY, "fcfs-fill", CONFIG, requests, CHECKED)
    assert first_come.ttft_s[1] + 0.001 == pytest.approx(first_come.ttft_s[0])


def test_one_that_runs_yields_to_a_newcomer_beside_a_chunk() -> None:
    # The long prompt takes the last slot but for one that runs and is to go on for longest.
    long, short = request(0.1, 1300, 2), request(0.14, 10, 2)
    engine = replace(ROOMY, max_running_requests=2, swap_token_s=1e-6)
    requests = [request(0.0, 50, 300), long, short]
    result = simulate(engine, "srpt-oracle", CONFIG, requests, PREEMPTIVE)
    assert result.num_yields[0] == 1
    assert result.ttft_s[2] + 0.14 < result.ttft_s[1] + 0.1


@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize("decode", [DecodeConfig(), DecodeConfig(max_gap_ms=22.0)])
@pytest.mark.parametrize("hints", [NO_HINTS, Hints(tpot_slo_ms=1.0)])
def test_a_prompt_in_many_chunks_goes_on_though_none_of_the_others_may_leave(
    is_mixed: bool, decode: DecodeConfig, hints: Hints
) -> None:
    # The prompt fits as it enters, with room for a few steps of the others. It takes more.
    engine = replace(ROOMY, kv_pool_tokens=1500, chunked_prefill_size=16, mixed_chunk=is_mixed)
    requests = [replace(request(0.0, 10, 399), hints=hints) for _ in range(8)]
    requests.append(request(0.5, 1000, 5))
    stay = Options(preempt=False, watch=watch)
    result = simulate(engine, "sage", replace(CONFIG, decode=decode), requests, stay)
    assert 0.5 + result.ttft_s[-1] < min(result.ttlt_s[:-1])


@pytest.mark.parametrize(("policy", "waits"), [("fcfs", True), ("fcfs-fill", False)])
def test_the_last_of_a_chunked_prompt_reserves_as_any_other_prompt(
    policy: str, waits: bool
) -> None:
    # By the cap of 400 tokens it is 512 + 88 + 1 + 400, and 111 more for the other.
    engine = replace(ROOMY, kv_pool_tokens=1100)
    requests = [request(0.0, num_tokens, 10) for num_tokens in (600, 100)]
    result = simulate(engine, policy, CONFIG, requests, CHECKED)
    assert (result.ttft_s[1] > result.ttft_s[0]) == waits


def test_a_clip_and_less_conservativeness_admit_more() -> None:
    engine = replace(ROOMY, kv_pool_tokens=1001)
    together = [request(0.0, 100, 3), request(0.0, 100, 1)]
    clipped = simulate(engine, "fcfs@clip=399", CONFIG, together, CHECKED)  # 2 x 500 < 1001
    own_s = STEP_TIME.prefill_s(1, 100, attended_pairs(0, 100))
    assert clipped.ttft_s[1] < own_s * 2
    # The second comes while the first runs, which holds some 100 tokens and has 398 to go.
    apart = [request(0.0, 100, 200), request(0.05, 100, 1)]
    engine = replace(ROOMY, kv_pool_tokens=800)
    for conservativeness, waits in ((1.0, True), (0.5, False)):  # 0.7 and 0.35 of those 398
        spec = f"fcfs@conservativeness={conservativeness}"
        result = simulate(engine, spec, CONFIG, apart, CHECKED)
        assert (result.ttlt_s[1] > result.ttlt_s[0] - 0.05) == waits


def test_the_youngest_are_retracted() -> None:
    result = simulate(MANY_SLOTS, "fcfs", CONFIG, burst(), CHECKED)
    retracted = np.flatnonzero(result.num_retractions)
    # The youngest that ran: those after them were still waiting.
    assert retracted.tolist() == list(range(retracted[0], retracted[-1] + 1))
    assert result.ttft_s[: retracted[-1] + 1].max() < result.ttft_s[retracted[-1] + 1 :].min()
    assert retracted[0] > 50
    # Prefilled once more, and only to the length that they had.
    assert 16 < (result.prefill_tokens - 100 * 16) / retracted.size < 116


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize("policy", [*sorted(STOCK), *policy_names()])
def test_invariants_hold_on_mixed_traffic(policy: str, preempt: bool, page_size: int) -> None:
    engine = replace(SMALL, page_size=page_size)
    oracle = policy == "srpt-oracle"
    requests = mixed(150, 6.0, 3, unknown=0.0 if oracle else 0.1)
    result = simulate(engine, policy, CONFIG, requests, Options(preempt=preempt, watch=watch))
    assert (result.ttlt_s >= result.alone_s * (1 - 1e-9)).all()
    assert preempt or result.num_yields.sum() == 0
    engine = replace(MANY_SLOTS, page_size=page_size)
    simulate(engine, policy, CONFIG, burst(), Options(preempt=preempt, watch=watch))


def test_the_mixed_traffic_yields_and_chunks() -> None:
    requests = mixed(150, 6.0, 3)
    assert simulate(SMALL, "sage", CONFIG, requests, Options(preempt=True)).num_yields.sum() > 0
    assert max(request.input_tokens for request in requests) > SMALL.chunked_prefill_size


def test_the_same_input_gives_the_same_bytes() -> None:
    requests = mixed(200, 6.0, 4)
    options = Options(preempt=True)
    first, second = (simulate(SMALL, "sage", CONFIG, requests, options) for _ in range(2))
    assert arrays(first) == arrays(second)


@pytest.mark.parametrize("policy", ["fcfs", "hrrn", "ltr", "sage"])
def test_leaps_are_steps(policy: str) -> None:
    requests = mixed(80, 6.0, 5)
    leaped = simulate(SMALL, policy, CONFIG, requests)
    finished: list[Progress] = []
    node = started(policy, requests, finished, CHECKED)
    while node.num_outstanding:
        before_s = node.now_s
        node.advance(math.nextafter(before_s, math.inf))
        if node.now_s == before_s:  # idle
            node.advance(before_s + 0.01)
            node.now_s = max(node.now_s, before_s + 0.01)
    for progress in finished:
        assert progress.last_token_s == pytest.approx(
            requests[progress.index].arrival_s + leaped.ttlt_s[progress.index], rel=1e-6, abs=0.02
        )


def started(
    policy: str, requests: list[SimRequest], finished: list[Progress], options: Options
) -> Node:
    node = make_node(SMALL, policy, CONFIG, options, finished.append)
    for index, each in enumerate(requests):
        node.submit(each, index)
    return node


@pytest.mark.parametrize("policy", sorted({*STOCK, *policy_names()} - {"srpt-oracle"}))
def test_no_decision_depends_on_a_true_length_that_is_not_yet_known(policy: str) -> None:
    requests, until_s = mixed(120, 6.0, 6), 12.0
    finished: list[Progress] = []
    node = started(policy, requests, finished, PREEMPTIVE)
    node.advance(until_s)
    known = {progress.index for progress in finished}
    others = [
        each if i in known else replace(each, output_tokens=each.max_new_tokens)
        for i, each in enumerate(requests)
    ]
    assert others != requests
    finished_too: list[Progress] = []
    other = started(policy, others, finished_too, PREEMPTIVE)
    other.advance(until_s)
    assert snapshot(other) == snapshot(node)
    assert [p.index for p in finished_too] == [p.index for p in finished]
    last_s = [p.last_token_s for p in finished]
    assert [p.last_token_s for p in finished_too] == pytest.approx(last_s)


def snapshot(node: Node) -> object:
    """Who is where, with what."""
    state = node.state
    for progress in state.decode:
        state.decode.sync(progress)
    running = [(p.index, p.generated_tokens, p.num_retractions) for p in state.decode]
    return running, [(p.index, p.generated_tokens, p.job.num_yields) for p in state.queue]


def test_a_clairvoyant_policy_gets_the_truth_and_others_the_prediction() -> None:
    requests = [request(0.0, 10, 50)] * 12 + [request(0.0, 10, 300), request(0.0, 10, 5)]
    result = simulate(SMALL, "srpt-oracle", CONFIG, requests, CHECKED)
    assert result.ttft_s[13] < result.ttft_s[12]


def test_predictions_delay_all_but_stock_policies() -> None:
    requests, options = [request(0.0, 10, 5)], Options(prediction_delay_s=0.5)
    plain = simulate(SMALL, "ssjf", CONFIG, requests)
    assert simulate(SMALL, "ssjf", CONFIG, requests, options).ttft_s[0] == plain.ttft_s[0] + 0.5
    assert simulate(SMALL, "fcfs", CONFIG, requests, options).ttft_s[0] == plain.ttft_s[0]


def test_a_yielding_request_comes_back_without_a_prefill() -> None:
    engine = replace(ROOMY, max_running_requests=1, swap_token_s=1e-3)
    requests = [request(0.0, 100, 300), request(1.0, 100, 3)]
    result = simulate(engine, "srpt-oracle", CONFIG, requests, Options(preempt=True, watch=watch))
    assert result.num_yields.tolist() == [1, 0]
    assert result.prefill_tokens == 200
    # Out and in, what the first held at 1 s.
    assert 2 * 100 < result.moved_tokens < 2 * 200
    swap_s = result.moved_tokens * 1e-3
    assert result.ttlt_s[0] == pytest.approx(sum(result.alone_s) + swap_s)


def test_preemption_without_a_reason_changes_nothing() -> None:
    engine = replace(SMALL, kv_pool_tokens=25_600, swap_token_s=1e6)
    requests = mixed(150, 6.0, 12)
    plain = simulate(engine, "sage", CONFIG, requests, Options(preempt=False))
    ready = simulate(engine, "sage", CONFIG, requests, PREEMPTIVE)
    assert ready.num_yields.sum() == 0
    assert ready.ttlt_s == pytest.approx(plain.ttlt_s)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no requests"),
        ([request(2.0, 10, 5), request(1.0, 10, 5)], "request 1 comes"),
        ([request(0.0, 10, 500)], "no possible lengths"),
        ([request(0.0, 4000, 5)], "may need"),
    ],
)
def test_impossible_requests_are_refused(bad: list[SimRequest], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(SMALL, "fcfs", CONFIG, bad)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_serve(name: str) -> None:
    engine: Engine = PRESETS[name]
    assert engine.kv_pool_tokens > 15_000
    result = simulate(engine, "sage", CONFIG, mixed(50, 2.0, 7), CHECKED)
    assert 50 < result.metrics()["median_e2e_latency_ms"] < 60_000


@pytest.mark.parametrize("is_out_of_memory", [True, False])
def test_room_that_others_were_to_have_is_planned_anew_as_memory_runs_out_alone(
    monkeypatch: pytest.MonkeyPatch, is_out_of_memory: bool
) -> None:
    # As patches/scheduler/preemption.py does it.
    two_slots = replace(SMALL, max_running_requests=2)
    node = make_node(two_slots, "sage", CONFIG, CHECKED, lambda _: None)
    for index in range(3):
        node.submit(request(0.0, 100, 50), index)
    node.advance(0.1)
    state = node.state
    (running, _), (waiting,) = state.decode, state.queue
    state.batch_is_full, state.num_arrivals_planned = False, state.num_queued
    leaves = Yield(running.job, Way.SWAP, "", None if is_out_of_memory else waiting.job)
    enters = () if is_out_of_memory else (Enter(waiting.job, ""),)
    monkeypatch.setattr(executor, "decide", lambda *args: Plan([0], (leaves, *enters)))
    executor.scheduling_pass(state)
    assert running.swapped
    assert state.num_arrivals_planned == (-1 if is_out_of_memory else state.num_queued)
