"""SGLang's own policies in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from bench.engines.simulator.stock import STOCK, ShortestPrefillPolicy
from sage_sched.config import SageConfig
from sage_sched.registry import policy_names
from tests.bench.engines.simulator.invariants import watch
from tests.bench.engines.simulator.traffic import MANY_SLOTS, SMALL, burst, mixed, request

CONFIG = SageConfig()
ONE_SLOT = replace(SMALL, max_running_requests=1)


def order(policy: str, inputs: list[int]) -> list[int]:
    """In which these are served that arrive while another runs, a millisecond apart."""
    requests = [request(0.0, 10, 100)]
    requests += [request(0.1 + 0.001 * i, tokens, 2) for i, tokens in enumerate(inputs)]
    result = simulate(ONE_SLOT, policy, CONFIG, requests, Options(watch=watch))
    first_s = result.ttft_s + np.array([each.arrival_s for each in requests])
    return [int(i) for i in np.argsort(first_s)[1:] - 1]


def test_not_in_the_registry() -> None:
    assert not STOCK.keys() & set(policy_names())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", [0, 1, 2]), ("lpm", [0, 1, 2]), ("shortest-prefill-first", [1, 2, 0])],
)
def test_orders(policy: str, expected: list[int]) -> None:
    assert order(policy, [300, 20, 100]) == expected


def test_hrrn_weighs_waiting_by_length() -> None:
    assert order("hrrn", [300, 20, 100]) == [1, 2, 0]
    # The clock goes on by the stale count of the running batch, 10 tokens a step.
    requests = [request(0.0, 10, 300), request(0.1, 100, 2), request(6.0, 90, 2)]
    result = simulate(ONE_SLOT, "hrrn", CONFIG, requests)
    assert result.ttft_s[1] + 0.1 < result.ttft_s[2] + 6.0


def test_lpm_and_hrrn_leave_a_long_queue_as_it_lies() -> None:
    inputs = [300, 20] * 70
    fallen_back = order("hrrn", inputs)[:10]
    assert fallen_back == list(range(10))


def test_a_long_prompt_leaves_room_in_its_chunks_for_shorter_ones() -> None:
    policy = ShortestPrefillPolicy()
    assert policy.chunk_limit(1000, 512, 16, [20, 100, 2000]) == 512 - 32 - 112
    assert policy.chunk_limit(50, 512, 16, [60]) is None
    long, short = request(0.0, 1500, 2), request(0.01, 20, 2)
    stock = simulate(SMALL, "shortest-prefill-first", CONFIG, [long, short], Options(watch=watch))
    fcfs = simulate(SMALL, "fcfs", CONFIG, [long, short], Options(watch=watch))
    assert stock.ttft_s[1] < fcfs.ttft_s[1] - 0.05


def test_a_retracted_request_queues_at_the_end() -> None:
    # The last of the burst wait with those who came while they ran, and later.
    late = [replace(each, arrival_s=20.5) for each in burst()[:30]]
    result = simulate(MANY_SLOTS, "fcfs", CONFIG, burst() + late, Options(watch=watch))
    retracted = np.flatnonzero(result.num_retractions)
    waited_s = result.ttlt_s + np.array([each.arrival_s for each in burst() + late])
    assert (retracted < 100).all()
    assert waited_s[retracted].min() > waited_s[100]


def test_to_fill_the_pool_under_fcfs_admits_more_and_overtakes_nobody() -> None:
    requests = mixed(200, 8.0, 11)
    stock, ours = (
        simulate(SMALL, policy, CONFIG, requests, Options(watch=watch))
        for policy in ("fcfs", "fcfs-fill")
    )
    assert ours.ttlt_s.mean() < 0.9 * stock.ttlt_s.mean()
    first_s = ours.ttft_s + np.array([each.arrival_s for each in requests])
    assert (np.diff(first_s) > -1e-9).all()
    assert ours.num_retractions.sum() == 0


def test_the_pool_is_filled_whatever_is_known_of_answers() -> None:
    known = mixed(200, 8.0, 11)
    unknown = [replace(each, distribution=None) for each in known]
    one, other = (simulate(SMALL, "fcfs-fill", CONFIG, each) for each in (known, unknown))
    assert (one.ttlt_s == other.ttlt_s).all()


def test_shortest_prefill_helps_where_short_prompts_have_short_answers() -> None:
    requests = mixed(200, 8.0, 11)
    means = {
        policy: simulate(SMALL, policy, CONFIG, requests).ttft_s.mean()
        for policy in ("fcfs", "shortest-prefill-first")
    }
    assert means["shortest-prefill-first"] < means["fcfs"]
