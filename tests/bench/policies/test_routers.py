"""The choice of a node."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies.cluster_view import ClusterView
from bench.policies.gorouting import GoRouting
from bench.policies.routers import ROUTERS, router_named
from bench.simulator.ledger import Ledger, Newcomer
from bench.simulator.prefix_index import BLOCK_TOKENS, PrefixIndex
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from tests.sage_sched.strategies import SERVER

KNOWN = LengthDistribution.from_samples([100], "history")
REQUEST = Newcomer(100, 1000, KNOWN)


def of_length(tokens: int, input_tokens: int = 100) -> Newcomer:
    return Newcomer(input_tokens, 5000, LengthDistribution.from_samples([tokens], "history"))


# Sums of these are exact, so that a reference which adds in another order has the same ties.
quarters = st.integers(0, 40).map(lambda n: n / 4)
late_or_not = st.integers(-8, 40).map(lambda n: n / 4)


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    num_nodes, num_queued = draw(st.integers(1, 5)), draw(st.integers(0, 12))

    def column(values: st.SearchStrategy[float], number: int = num_queued) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=number, max_size=number)), np.float64)

    queued = column(st.integers(0, num_nodes - 1).map(float)).astype(np.int64)
    return ClusterView(
        prefill_s=column(quarters, num_nodes),
        cached_tokens=np.zeros(num_nodes, np.int64),
        input_tokens=10,
        answer_tokens=draw(st.sampled_from([1.0, 40.0])),
        ttft_s=draw(st.sampled_from([0.5, 2.0, 5.0, 20.0, math.inf])),
        tpot_s=draw(st.sampled_from([0.5, 2.0, math.inf])),
        gain=draw(st.sampled_from([1.0, 2.0, 8.0])),
        decode_s=column(quarters, num_nodes),
        queue_age_s=column(quarters, num_nodes),
        node=queued,
        tokens=np.full(num_queued, 10),
        left_tokens=column(quarters),
        step_s=column(quarters),
        queue_node=queued,
        exec_s=column(quarters),
        remain_s=column(late_or_not),
        queue_gain=column(st.sampled_from([1.0, 2.0, 4.0])),
        fixed_s=draw(st.sampled_from([0.0, 0.25, 1.0])),
    )


def candidates(view: ClusterView, limits: GoRouting) -> set[int]:
    """Return the allowed nodes by Algorithm 2, line by line, with loops."""
    nodes = range(view.num_nodes)
    entries = [*zip(view.queue_node, view.exec_s, view.remain_s, view.queue_gain, strict=True)]
    queues = {p: [(e, r, g) for node, e, r, g in entries if node == p] for p in nodes}

    def estimate_gain(p: int, queue: list[tuple[float, float, float]]) -> float:
        in_time = [r for e, r, _ in queue if r >= e + view.fixed_s]
        budget = max(min([*in_time, view.tpot_s]), 2 * view.fixed_s)
        is_free = budget == math.inf or view.fixed_s == 0
        factor = 1.0 if is_free else budget / (budget - view.fixed_s)
        phi = factor * sum(e for e, _, _ in queue)
        phi = max(0.0, phi + view.decode_s[p] - view.queue_age_s[p])
        return sum(g for _, r, g in queue if phi <= r + 1e-12)

    def estimate_exec(p: int) -> float:
        work = sum(e for e, _, _ in queues[p]) + view.decode_s[p]
        return max(0.0, work - view.queue_age_s[p])

    def with_request(p: int) -> list[tuple[float, float, float]]:
        return [*queues[p], (view.prefill_s[p], view.ttft_s, view.gain)]

    delta = {p: estimate_gain(p, with_request(p)) - estimate_gain(p, queues[p]) for p in nodes}
    best = max(delta.values())
    if best <= 0:
        return set(nodes)
    chosen = [p for p in nodes if delta[p] >= limits.alpha * best]
    if light := [p for p in chosen if estimate_exec(p) < limits.mu * view.ttft_s]:
        return {min(light, key=estimate_exec)}
    most_s = limits.lambda_ * view.ttft_s
    if rest := [p for p in chosen if estimate_exec(p) + view.prefill_s[p] <= most_s]:
        return {max(rest, key=estimate_exec)}
    return {min(chosen, key=estimate_exec)}


@given(views(), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([0.0, 0.25, 0.5]))
def test_gorouting_is_algorithm_2(view: ClusterView, alpha: float, mu: float) -> None:
    router = GoRouting()
    router.alpha, router.mu, router.lambda_ = alpha, mu, mu + 0.5
    assert router.pick(view) in candidates(view, router)


@settings(max_examples=400)
@given(views())
def test_predicted_cost_costs_all_together_the_least(view: ClusterView) -> None:
    def cost_s(p: int) -> float:
        others = [i for i in range(len(view.node)) if view.node[i] == p]
        waited_s = sum([float(view.prefill_s[p])] * (1 + len(others)))
        together = [min(float(view.left_tokens[i]), view.answer_tokens) for i in others]
        steps_s = [float(view.step_s[i]) for i in others]
        return waited_s + sum(2 * t * s for t, s in zip(together, steps_s, strict=True))

    picked = router_named("predicted-cost").pick(view)
    assert picked == min(range(view.num_nodes), key=cost_s)


@given(views(), st.sampled_from(ROUTERS))
def test_every_dispatcher_picks_a_node_and_the_same_again(view: ClusterView, name: str) -> None:
    one, again = router_named(name, 5), router_named(name, 5)
    picked = [one.pick(view) for _ in range(3)]
    assert picked == [again.pick(view) for _ in range(3)]
    assert all(0 <= pick < view.num_nodes for pick in picked)


def num_unfinished(ledger: Ledger) -> list[float]:
    return ledger.view(REQUEST, 9.0).by_node().tolist()


def picks(name: str, ledger: Ledger, request: Newcomer, now_s: float = 0.0) -> int:
    return router_named(name).pick(ledger.view(request, now_s))


def test_a_long_answer_weighs_more_than_two_short_ones() -> None:
    ledger = Ledger(2, SERVER)
    ledger.sent("long", 0, of_length(4000), 0.0)
    ledger.sent("short", 1, of_length(10), 0.0)
    ledger.sent("short too", 1, of_length(10), 0.0)
    assert picks("total_requests", ledger, of_length(2000)) == 0
    assert picks("predicted-cost", ledger, of_length(2000)) == 1


def test_a_prefix_draws_requests_as_far_as_it_saves_time() -> None:
    keys = [("shared", i) for i in range(40)]
    prompt = replace(of_length(10, 41 * BLOCK_TOKENS), keys=keys)
    ledger = Ledger(2, SERVER)
    ledger.sent("first", 1, prompt, 0.0)
    ledger.ended("first", 1, 1.0)
    view = ledger.view(prompt, 1.0)
    assert view.cached_tokens.tolist() == [0, 40 * BLOCK_TOKENS]
    assert view.prefill_s[0] > 2 * view.prefill_s[1]
    assert picks("predicted-cost", ledger, prompt, 1.0) == 1
    for number in range(30):
        ledger.sent(number, 1, of_length(10, 1000), 1.0)
    assert picks("predicted-cost", ledger, prompt, 1.0) == 0


def test_what_was_worked_off_since_is_taken_off() -> None:
    ledger = Ledger(2, SERVER)
    for node, heard_s in ((0, 5.0), (1, 0.0)):
        ledger.sent(node, node, of_length(100, 2000), 0.0)
        ledger.report(node, {node: 0}, heard_s)
    assert ledger.view(REQUEST, 5.0).queue_age_s.tolist() == [0.0, 5.0]
    assert picks("min-load", ledger, of_length(4000), 5.0) == 1


def test_the_queues_age_begins_with_its_oldest_prompt() -> None:
    ledger = Ledger(1, SERVER)
    ledger.report(0, {}, 0.0)
    ledger.sent("a", 0, REQUEST, 100.0)
    assert ledger.view(REQUEST, 101.0).queue_age_s.tolist() == [1.0]
    # A decoding request does not make the queue look older.
    ledger.grown("a", 0, 1, 101.0)
    ledger.sent("b", 0, REQUEST, 111.0)
    assert ledger.view(REQUEST, 111.0).queue_age_s.tolist() == [0.0]


def test_an_empty_queues_age_begins_with_its_prompt_though_another_node_is_busy() -> None:
    ledger = Ledger(2, SERVER)
    ledger.sent("a", 0, REQUEST, 0.0)
    ledger.sent("b", 1, REQUEST, 5.0)
    assert ledger.view(REQUEST, 6.0).queue_age_s.tolist() == [6.0, 1.0]


def test_a_report_ends_what_it_does_not_name() -> None:
    ledger = Ledger(2, SERVER)
    for rid in "abc":
        ledger.sent(rid, 0, REQUEST, 0.0)
    ledger.sent("d", 1, REQUEST, 0.0)
    ledger.report(0, {"a": 0, "b": 7}, 1.0)
    view = ledger.view(REQUEST, 1.0)
    assert num_unfinished(ledger) == [2, 1]
    assert sorted(view.tokens.tolist()) == [100, 100, 107]
    assert sorted(view.queue_node.tolist()) == [0, 1]
    # What ends twice, or was never there, changes nothing.
    ledger.ended("a", 0, 2.0)
    ledger.ended("a", 0, 2.0)
    ledger.grown("nobody", 0, 3, 2.0)
    assert num_unfinished(ledger) == [1, 1]


def test_less_is_left_of_an_answer_that_is_further() -> None:
    ledger = Ledger(1, SERVER)
    ledger.sent("a", 0, of_length(1000), 0.0)
    before = ledger.view(REQUEST, 0.0).left_tokens[0]
    ledger.grown("a", 0, 960, 1.0)
    assert ledger.view(REQUEST, 1.0).left_tokens[0] < 0.6 * before
    # An answer of which nothing is known is work too.
    ledger.sent("b", 0, Newcomer(10, 4096), 0.0)
    assert ledger.view(REQUEST, 0.0).left_tokens.min() > 0


def test_deadlines_count_from_when_a_request_was_sent() -> None:
    ledger = Ledger(1, SERVER)
    promised = replace(REQUEST, hints=Hints(ttft_slo_ms=2000.0, weight=3.0))
    ledger.sent("a", 0, promised, 10.0)
    view = ledger.view(promised, 11.5)
    assert view.remain_s.tolist() == pytest.approx([0.5])
    assert view.queue_gain.tolist() == [3.0]
    assert view.ttft_s == 2.0


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12), st.integers(1, 8))
def test_a_prefix_index_never_names_more_than_was_sent(
    prompts: list[list[int]], most_blocks: int
) -> None:
    index = PrefixIndex(3, most_blocks * BLOCK_TOKENS)
    sent: list[set[tuple[int, ...]]] = [set(), set(), set()]
    for number, prompt in enumerate(prompts):
        keys = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        found = index.cached_tokens(keys)
        for node in range(3):
            known = sum(key in sent[node] for key in keys) * BLOCK_TOKENS
            assert found[node] <= min(known, most_blocks * BLOCK_TOKENS)
        index.add(number % 3, keys)
        sent[number % 3] |= set(keys)
        kept = min(len(keys), most_blocks) * BLOCK_TOKENS
        assert index.cached_tokens(keys)[number % 3] >= kept


def test_of_those_that_decode_the_one_with_less_to_do_is_of_the_pair() -> None:
    prefill, decode = Ledger(3, SERVER), Ledger(3, SERVER)
    for node, length, input_tokens in ((0, 500, 1500), (1, 500, 3000), (2, 100, 1100)):
        decode.sent(node, node, of_length(length, input_tokens), 0.0)
    views = (ledger.view(of_length(400), 0.0) for ledger in (prefill, decode))
    assert router_named("gorouting").pick_pair(*views)[1] == 2
