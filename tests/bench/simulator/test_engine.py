"""One simulated engine, and SGLang's own policies there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.policies.routers import router_named
from bench.simulator.cluster import Cluster
from bench.simulator.radix_tree import RadixTree
from bench.simulator.request import Progress, SimRequest
from bench.simulator.run import make_node, simulate
from bench.simulator.state import Options
from bench.simulator.stock import STOCK
from sage_sched.app.registry import policy_names
from tests.bench.simulator.traffic import CHECKED, CONFIG, MANY_SLOTS, SMALL, STAY, burst, mixed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [STAY, CHECKED], ids=["stay", "preempt"])
def test_a_cluster_of_one_is_the_engine(options: Options) -> None:
    first = mixed(90, 6.0, 8)
    later = [replace(each, follows=i, pause_s=0.25) for i, each in enumerate(mixed(60, 4.0, 13))]
    alone = simulate(SMALL, "sage", CONFIG, [*first, *later], options)
    cluster = Cluster(SMALL, "sage", CONFIG, [*first, *later], options, 1)
    found = cluster.serve(router_named("round_robin"))
    assert found.ttlt_s == pytest.approx(alone.ttlt_s)


def test_a_part_of_a_sequence_stays_its_session_s() -> None:
    tree = RadixTree(page_size=1)
    tree.insert([(1, 0, 8)], "a")
    tree.match([(1, 0, 5), (2, 0, 3)])
    assert tree.kept_for() == {"a": 8}


@pytest.mark.parametrize(("options", "page_size"), [(STAY, 1), (CHECKED, 16)])
@pytest.mark.parametrize("policy", [*sorted(STOCK), "srpt-oracle"])
def test_invariants_hold_on_mixed_traffic(policy: str, options: Options, page_size: int) -> None:
    """The fuzzer runs random traffic under the other policies."""
    small, many = (replace(engine, page_size=page_size) for engine in (SMALL, MANY_SLOTS))
    result = simulate(small, policy, CONFIG, mixed(150, 6.0, 3), options)
    preempts = options.preempt and policy == "srpt-oracle"
    assert (result.num_preemptions.sum() > 0) == preempts
    crowded = simulate(many, policy, CONFIG, burst(), options)
    assert (crowded.ttlt_s >= crowded.alone_s * (1 - 1e-9)).all()
    assert crowded.num_retractions.sum() > 0 or policy == "srpt-oracle"


@pytest.mark.parametrize("policy", sorted({*STOCK, *policy_names()} - {"srpt-oracle"}))
def test_no_decision_depends_on_a_true_length_that_is_not_yet_known(policy: str) -> None:
    requests = mixed(120, 6.0, 6)

    def at_12_s(requests: list[SimRequest]) -> tuple[dict[int, float], list[tuple[int, int, int]]]:
        """Return when requests finished, and the place and tokens of the others."""
        finished: list[Progress] = []
        node = make_node(SMALL, policy, CONFIG, CHECKED, finished.append)
        for index, each in enumerate(requests):
            node.submit(each, index)
        node.advance(12.0)
        node.state.running_jobs()  # updates their tokens
        others = [*node.state.decode, *node.state.returning, *node.state.queue]
        places = [(p.index, p.generated_tokens, p.job.num_preemptions) for p in others]
        return {p.index: p.last_token_s for p in finished}, places

    finished, places = at_12_s(requests)
    others = [
        each if i in finished else replace(each, output_tokens=each.max_new_tokens)
        for i, each in enumerate(requests)
    ]
    assert others != requests
    assert at_12_s(others) == (pytest.approx(finished), places)
