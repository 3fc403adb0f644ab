"""One simulated engine, on cases that can be worked out by hand, and on mixed traffic."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.simulator.node import Node
from bench.simulator.presets import WRITE_POLICIES, Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.result import alone_s
from bench.simulator.run import make_node, simulate
from bench.simulator.state import Options
from bench.simulator.stock import STOCK
from sage_sched.app.config import DecodeConfig
from sage_sched.app.registry import policy_names
from sage_sched.job import NO_HINTS, Hints
from sage_sched.steps import attended_pairs
from tests.bench.simulator.traffic import (
    CHECKED,
    CONFIG,
    MANY_SLOTS,
    SMALL,
    STAY,
    STEP_TIME,
    burst,
    mixed,
    request,
)

pytestmark = pytest.mark.slow

ROOMY = replace(SMALL, kv_pool_tokens=65536, page_size=1, max_prefill_tokens=8192)


def prefill_s(new_tokens: int, done_tokens: int = 0) -> float:
    return STEP_TIME.prefill_s(1, new_tokens, attended_pairs(done_tokens, new_tokens))


def decode_s(*context_tokens: int) -> float:
    return sum(STEP_TIME.decode_s(1, tokens) for tokens in context_tokens)


def test_a_long_prompt_is_prefilled_in_chunks_before_anyone_decodes() -> None:
    requests = [request(0.0, 50, 10), request(0.01, 1200, 1)]  # it comes in the first's prefill
    result = simulate(ROOMY, "fcfs", CONFIG, requests, CHECKED)
    chunks_s = prefill_s(512) + prefill_s(512, 512) + prefill_s(176, 1024)
    assert result.ttft_s[1] + 0.01 == pytest.approx(prefill_s(50) + chunks_s)
    assert result.ttlt_s[0] == pytest.approx(prefill_s(50) + chunks_s + decode_s(*range(51, 60)))
    assert alone_s(ROOMY, 1200, 1) == pytest.approx(chunks_s)


TOGETHER = [request(0.0, 100, 3), request(0.0, 100, 1)]
# The second comes while the first runs, which holds some 100 tokens and has 398 to go.
APART = [request(0.0, 100, 200), request(0.05, 100, 1)]
CHUNKED = [request(0.0, 600, 10), request(0.0, 100, 10)]


@pytest.mark.parametrize(
    ("policy", "pool_tokens", "requests", "gets_in"),
    [
        ("fcfs", 1003, TOGETHER, "beside"),  # 2 x (100 + 400 + 1) tokens are set aside
        ("fcfs", 1001, TOGETHER, "next"),  # then the first counts with 0.7 of its cap only
        ("fcfs", 880, TOGETHER, "after"),  # 100 + 0.7 * 399 + 501 and one less
        ("fcfs@clip=399", 1001, TOGETHER, "beside"),
        ("fcfs@conservativeness=1.0", 800, APART, "after"),
        ("fcfs@conservativeness=0.5", 800, APART, "next"),
        # The last chunk sets aside 512 + 88 + 1 + 400, and 111 more for the other.
        ("fcfs", 1100, CHUNKED, "after"),
        ("fcfs-fill", 1100, CHUNKED, "beside"),
    ],
)
def test_admission_sets_caps_aside(
    policy: str, pool_tokens: int, requests: list[SimRequest], gets_in: str
) -> None:
    engine = replace(ROOMY, kv_pool_tokens=pool_tokens)
    result = simulate(engine, policy, CONFIG, requests, CHECKED)
    first_s = result.arrival_s + result.ttft_s
    is_beside = first_s[1] == first_s[0]
    is_after = first_s[1] > result.arrival_s[0] + result.ttlt_s[0]
    assert gets_in == ("beside" if is_beside else "after" if is_after else "next")


@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize("decode", [DecodeConfig(), DecodeConfig(max_gap_ms=22.0)])
@pytest.mark.parametrize("hints", [NO_HINTS, Hints(tpot_slo_ms=1.0)])
def test_a_chunked_prompt_is_never_stuck(
    is_mixed: bool, decode: DecodeConfig, hints: Hints
) -> None:
    # The prompt fits as it enters, with room for a few steps of the others. It takes more.
    engine = replace(ROOMY, kv_pool_tokens=1500, chunked_prefill_size=16, mixed_chunk=is_mixed)
    requests = [request(0.0, 10, 399, hints=hints)] * 8 + [request(0.5, 1000, 5)]
    result = simulate(engine, "sage", replace(CONFIG, decode=decode), requests, STAY)
    assert 0.5 + result.ttft_s[-1] < min(result.ttlt_s[:-1])


def with_documents(requests: list[SimRequest]) -> list[SimRequest]:
    """Half of each prompt becomes the beginning of one of a few documents."""
    rng, shared = np.random.default_rng(0), []
    for number, each in enumerate(requests):
        half = each.input_tokens // 2
        own = (100 + number, 0, each.input_tokens - half)
        spans = ((int(rng.integers(4)), 0, half), own) if half else (own,)
        shared.append(replace(each, spans=spans))
    return shared


@pytest.mark.parametrize(("options", "page_size"), [(STAY, 1), (CHECKED, 16)])
@pytest.mark.parametrize("policy", [*sorted(STOCK), *policy_names()])
def test_invariants_hold_on_mixed_traffic(policy: str, options: Options, page_size: int) -> None:
    requests = mixed(150, 6.0, 3, unknown=0.0 if policy == "srpt-oracle" else 0.1)
    result = simulate(
        replace(SMALL, page_size=page_size), policy, CONFIG, with_documents(requests), options
    )
    assert result.prefill_tokens < sum(each.input_tokens for each in requests)
    if policy == "sage" or not options.preempt:
        assert (result.num_preemptions.sum() > 0) == options.preempt
    apart = simulate(replace(MANY_SLOTS, page_size=page_size), policy, CONFIG, burst(), options)
    assert (apart.ttlt_s >= apart.alone_s * (1 - 1e-9)).all()


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "sage"])
def test_invariants_hold_with_a_host_tier(policy: str, write_policy: str) -> None:
    requests = with_documents(mixed(150, 6.0, 5))
    without, with_tier = (
        simulate(
            replace(SMALL, hicache_write_policy=write_policy, hicache_ratio=ratio),
            policy, CONFIG, requests, CHECKED,
        )
        for ratio in (0.0, 1.5)
    )  # fmt: skip
    assert with_tier.prefill_tokens < without.prefill_tokens


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill", "uniboost"])
def test_a_document_that_many_ask_about_at_once_is_computed_once(policy: str) -> None:
    requests = [
        request(0.0, 168, 5, spans=((1, 0, 160), (100 + number, 0, 8))) for number in range(5)
    ]
    assert simulate(SMALL, policy, CONFIG, requests, CHECKED).prefill_tokens == 160 + 5 * 8
    assert simulate(SMALL, "fcfs", CONFIG, requests, CHECKED).prefill_tokens > 2 * 168


def started(
    policy: str, requests: list[SimRequest], finished: list[Progress], engine: Engine = SMALL
) -> Node:
    node = make_node(engine, policy, CONFIG, CHECKED, finished.append)
    for index, each in enumerate(requests):
        node.submit(each, index)
    return node


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "hrrn", "ltr", "sage"])
def test_leaps_are_steps(policy: str, is_mixed: bool) -> None:
    engine = replace(SMALL, mixed_chunk=is_mixed)
    hints = Hints(ttft_slo_ms=800.0, tpot_slo_ms=50.0)
    requests = [replace(each, hints=hints) for each in mixed(80, 6.0, 5)]
    leaped = simulate(engine, policy, CONFIG, requests)
    finished: list[Progress] = []
    node = started(policy, requests, finished, engine)
    while node.num_outstanding:
        before_s = node.now_s
        node.advance(math.nextafter(before_s, math.inf))
        if node.now_s == before_s:  # idle
            node.advance(before_s + 0.01)
            node.now_s = max(node.now_s, before_s + 0.01)
    finished.sort(key=lambda progress: progress.index)
    last_s = [progress.last_token_s for progress in finished]
    assert last_s == pytest.approx(leaped.arrival_s + leaped.ttlt_s, rel=1e-6, abs=0.02)
    # In a leap a token that comes at its deadline may go either way.
    on_time = np.array([progress.num_next_on_time for progress in finished])
    assert np.abs(leaped.num_next_on_time - on_time).max() <= 1


@pytest.mark.parametrize("policy", sorted({*STOCK, *policy_names()} - {"srpt-oracle"}))
def test_no_decision_depends_on_a_true_length_that_is_not_yet_known(policy: str) -> None:
    requests, until_s = mixed(120, 6.0, 6), 12.0

    def found(requests: list[SimRequest]) -> tuple[list[Progress], object]:
        """Return the finished requests, and the place and tokens of the others."""
        finished: list[Progress] = []
        node = started(policy, requests, finished)
        node.advance(until_s)
        for progress in node.state.decode:
            node.state.decode.sync(progress)
        inside = [(p.index, p.generated_tokens, p.num_retractions) for p in node.state.decode]
        waits = [(p.index, p.generated_tokens, p.job.num_preemptions) for p in node.state.queue]
        return finished, (inside, waits)

    finished, where = found(requests)
    known = {progress.index for progress in finished}
    others = [
        each if i in known else replace(each, output_tokens=each.max_new_tokens)
        for i, each in enumerate(requests)
    ]
    assert others != requests
    finished_too, where_too = found(others)
    assert where_too == where
    assert [p.index for p in finished_too] == [p.index for p in finished]
    last_s = [p.last_token_s for p in finished]
    assert [p.last_token_s for p in finished_too] == pytest.approx(last_s)


def test_predictions_delay_all_but_stock_policies() -> None:
    requests, delayed = [request(0.0, 10, 5)], Options(prediction_delay_s=0.5)
    for policy, delay_s in (("ssjf", 0.5), ("fcfs", 0.0)):
        plain, late = (simulate(SMALL, policy, CONFIG, requests, of) for of in (None, delayed))
        assert late.ttft_s[0] == plain.ttft_s[0] + delay_s


def test_a_yielding_request_comes_back_without_a_prefill() -> None:
    engine = replace(ROOMY, max_running_requests=1, swap_token_s=1e-3)
    requests = [request(0.0, 100, 300), request(1.0, 100, 3)]
    result = simulate(engine, "srpt-oracle", CONFIG, requests, CHECKED)
    assert result.num_preemptions.tolist() == [1, 0]
    assert result.prefill_tokens == 200
    # The KV of the first at 1 s moves out and in.
    assert 2 * 100 < result.moved_tokens < 2 * 200
    assert 2 * result.peak_host_tokens == result.moved_tokens
    swap_s = result.moved_tokens * 1e-3
    assert result.ttlt_s[0] == pytest.approx(sum(result.alone_s) + swap_s)
