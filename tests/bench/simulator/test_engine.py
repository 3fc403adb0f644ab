"""One simulated engine, and SGLang's own policies there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.simulator.node import Node
from bench.simulator.presets import Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.result import alone_s
from bench.simulator.run import make_node, simulate
from bench.simulator.state import Options
from bench.simulator.stock import STOCK, ShortestPrefillPolicy
from sage_sched.app.registry import policy_names
from sage_sched.job import Hints
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


@pytest.mark.parametrize(("options", "page_size"), [(STAY, 1), (CHECKED, 16)])
@pytest.mark.parametrize("policy", [*sorted(STOCK), "srpt-oracle"])
def test_invariants_hold_on_mixed_traffic(policy: str, options: Options, page_size: int) -> None:
    """Of the other policies the fuzzer has random traffic."""
    small, many = (replace(engine, page_size=page_size) for engine in (SMALL, MANY_SLOTS))
    result = simulate(small, policy, CONFIG, mixed(150, 6.0, 3), options)
    preempts = options.preempt and policy == "srpt-oracle"
    assert (result.num_preemptions.sum() > 0) == preempts
    crowded = simulate(many, policy, CONFIG, burst(), options)
    assert (crowded.ttlt_s >= crowded.alone_s * (1 - 1e-9)).all()
    assert crowded.num_retractions.sum() > 0 or policy == "srpt-oracle"


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
    on_time = [progress.num_next_on_time for progress in finished]
    assert on_time == pytest.approx(leaped.num_next_on_time, abs=1)


@pytest.mark.parametrize("policy", sorted({*STOCK, *policy_names()} - {"srpt-oracle"}))
def test_no_decision_depends_on_a_true_length_that_is_not_yet_known(policy: str) -> None:
    requests = mixed(120, 6.0, 6)

    def at_12_s(requests: list[SimRequest]) -> tuple[dict[int, float], list[tuple[int, int, int]]]:
        """Return when requests finished, and the place and tokens of the others."""
        finished: list[Progress] = []
        node = started(policy, requests, finished)
        node.advance(12.0)
        node.state.running_jobs()  # brings their tokens up to date
        others = [*node.state.decode, *node.state.queue]
        places = [(p.index, p.generated_tokens, p.job.num_preemptions) for p in others]
        return {p.index: p.last_token_s for p in finished}, places

    finished, places = at_12_s(requests)
    others = [
        each if i in finished else replace(each, output_tokens=each.max_new_tokens)
        for i, each in enumerate(requests)
    ]
    assert others != requests
    assert at_12_s(others) == (pytest.approx(finished), places)


def test_predictions_delay_all_but_stock_policies() -> None:
    requests, delayed = [request(0.0, 10, 5)], Options(prediction_delay_s=0.5)
    for policy, delay_s in (("ssjf", 0.5), ("fcfs", 0.0)):
        plain, late = (simulate(SMALL, policy, CONFIG, requests, of) for of in (None, delayed))
        assert late.ttft_s[0] == plain.ttft_s[0] + delay_s


def test_a_long_prompt_leaves_room_in_its_chunks_for_shorter_ones() -> None:
    policy = ShortestPrefillPolicy()
    works = ([20, 100, 2000], [20, 460, 20], [20, 480], [60])
    limits = [policy.chunk_limit(1000 if len(of) > 1 else 50, 512, 16, of) for of in works]
    assert limits == [512 - 32 - 112, 512 - 32 - 464, 512 - 32, None]


def test_a_retraction_estimates_the_new_token_ratio_anew() -> None:
    node = started("fcfs", [request(0.0, 10, 50, 100)] * 2, [])
    node.advance(0.5)
    num_generated = sum(node.ages().values())
    node.state.ratio.estimate(node.state.decode)
    assert node.state.ratio.value == (num_generated + 20 * 2) / (2 * 100 + 1)
