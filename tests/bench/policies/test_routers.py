"""Routers, and what their ledger knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

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


def of_length(tokens: int, input_tokens: int = 100) -> Newcomer:
    return Newcomer(input_tokens, 5000, LengthDistribution.from_samples([tokens], "history"))


REQUEST = of_length(100)


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


def cost_s(view: ClusterView, p: int) -> float:
    """Return the seconds that the request costs all together at a node."""
    others = [i for i in range(len(view.node)) if view.node[i] == p]
    waited_s = sum([float(view.prefill_s[p])] * (1 + len(others)))
    together = [min(float(view.left_tokens[i]), view.answer_tokens) for i in others]
    steps_s = [float(view.step_s[i]) for i in others]
    return waited_s + sum(2 * t * s for t, s in zip(together, steps_s, strict=True))


@settings(max_examples=300)
@given(views(), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([0.0, 0.25, 0.5]))
def test_routers_pick_by_their_definitions(view: ClusterView, alpha: float, mu: float) -> None:
    router = GoRouting()
    router.alpha, router.mu, router.lambda_ = alpha, mu, mu + 0.5
    assert router.pick(view) in candidates(view, router)
    nodes = range(view.num_nodes)
    assert router_named("predicted-cost").pick(view) == min(nodes, key=partial(cost_s, view))
    for name in ROUTERS:
        one, again = router_named(name, 5), router_named(name, 5)
        picked = [one.pick(view) for _ in range(3)]
        assert picked == [again.pick(view) for _ in range(3)]
        assert {*picked} <= {*nodes}
        assert name != "round_robin" or picked == [i % view.num_nodes for i in range(3)]


def asking(keys: int, input_tokens: int, tokens: int = 10) -> Newcomer:
    """Return a request whose prompt begins with these many shared blocks."""
    return replace(of_length(tokens, input_tokens), keys=[("shared", i) for i in range(keys)])


PROMPT = 40 * BLOCK_TOKENS
WITH_PREFIX, IDLE = [asking(40, PROMPT)], list[Newcomer]()


@pytest.mark.parametrize(
    ("nodes", "asked", "picks"),
    [
        # A long prompt with a long answer, or two that are short.
        (
            [[of_length(4000, 300)], [of_length(10)] * 2],
            of_length(2000),
            {"total_requests": 0, "total_tokens": 1, "min-load": 1, "predicted-cost": 1},
        ),
        # A prefix attracts a request while it saves time, and the cache-aware router from a share
        # of 0.3 on, unless the node has 65 requests more and half as many again.
        ([WITH_PREFIX, IDLE], asking(40, PROMPT + 9), {"cache_aware": 0, "predicted-cost": 0}),
        ([WITH_PREFIX, IDLE], asking(40, 4 * PROMPT), {"cache_aware": 1}),
        ([WITH_PREFIX * 64, IDLE], asking(40, PROMPT + 9), {"cache_aware": 0}),
        ([WITH_PREFIX * 65, IDLE], asking(40, PROMPT + 9), {"cache_aware": 1, "predicted-cost": 1}),
        ([WITH_PREFIX * 210, [REQUEST] * 140], asking(40, PROMPT + 9), {"cache_aware": 0}),
    ],
)
def test_each_router_has_its_measure(
    nodes: list[list[Newcomer]], asked: Newcomer, picks: dict[str, int]
) -> None:
    ledger = ledger_of(*nodes)
    assert {name: router_named(name).pick(ledger.view(asked, 0.0)) for name in picks} == picks


def ledger_of(*nodes: Sequence[Newcomer]) -> Ledger:
    """Return a ledger of nodes to which these requests were sent at 0 s, by their place there."""
    ledger = Ledger(len(nodes), SERVER)
    for node, requests in enumerate(nodes):
        for number, each in enumerate(requests):
            ledger.sent(number, node, each, 0.0)
    return ledger


def test_the_less_busy_of_two_random_nodes_is_picked() -> None:
    view = ledger_of([REQUEST] * 2, [REQUEST], []).view(REQUEST, 0.0)
    assert {router_named("power_of_two", seed).pick(view) for seed in range(20)} == {1, 2}


def test_the_decode_node_of_a_pair_has_the_most_free_memory() -> None:
    decode = ledger_of([of_length(500, 1500)], [of_length(500, 3000)], [of_length(100, 1100)])
    views = (ledger.view(of_length(400), 0.0) for ledger in (Ledger(3, SERVER), decode))
    assert router_named("gorouting").pick_pair(*views)[1] == 2


def test_the_ages_of_queues() -> None:
    """A queue is as old as the node's last report, or its first prompt if that came later."""

    def ages_s(now_s: float) -> list[float]:
        return ledger.view(REQUEST, now_s).queue_age_s.tolist()

    ledger = ledger_of([of_length(100, 2000)], [of_length(100, 2000)])
    assert ages_s(6.0) == [6.0, 6.0]
    ledger.report(0, {0: 0}, 5.0)
    assert ages_s(5.0) == [0.0, 5.0]
    assert router_named("min-load").pick(ledger.view(of_length(4000), 5.0)) == 1
    ledger.sent("later", 1, REQUEST, 6.0)
    assert ages_s(6.0) == [1.0, 6.0]
    # Both decode: the next prompts begin the queues anew.
    ledger.report(1, {0: 1, "later": 1}, 7.0)
    ledger.grown(0, 0, 1, 7.0)
    ledger.sent("last", 1, REQUEST, 107.0)
    assert ages_s(108.0)[1] == 1.0


def test_what_a_ledger_knows_of_requests() -> None:
    promised = replace(of_length(1000), hints=Hints(ttft_slo_ms=2000.0, weight=3.0))
    ledger = ledger_of([promised, REQUEST, REQUEST], [REQUEST])
    before = ledger.view(promised, 0.5)
    assert before.by_node().tolist() == [3, 1]
    assert (before.ttft_s, before.remain_s[0]) == (2.0, 1.5)
    assert before.gain == before.queue_gain[0] == 3.0
    # A report ends the requests that it does not name.
    ledger.report(0, {0: 960, 1: 0}, 1.0)
    view = ledger.view(REQUEST, 1.0)
    assert view.by_node().tolist() == [2, 1]
    assert view.left_tokens[0] < 0.6 * before.left_tokens[0]
    assert (view.tokens.tolist(), view.queue_node.tolist()) == ([1060, 100, 100], [0, 1])
    # No event of a request that has ended, or was never there, changes anything.
    ledger.ended(2, 0, 2.0)
    ledger.grown("unknown", 0, 3, 2.0)
    assert ledger.view(REQUEST, 2.0).by_node().tolist() == [2, 1]
    ledger.sent("no prediction", 0, Newcomer(10, 4096), 0.0)
    assert ledger.view(REQUEST, 0.0).left_tokens.min() > 0


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
