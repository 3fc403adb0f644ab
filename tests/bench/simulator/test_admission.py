"""SGLang's admission, and refused requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, request

ROOMY = replace(SMALL, kv_pool_tokens=65536, page_size=1, max_prefill_tokens=8192)
TOGETHER = [request(0.0, 100, 3), request(0.0, 100, 1)]
# The second comes while the first runs, which holds some 100 tokens and has 398 to go.
APART = [request(0.0, 100, 200), request(0.05, 100, 1)]
CHUNKED = [request(0.0, 600, 10), request(0.0, 100, 10)]


@pytest.mark.parametrize(
    ("policy", "pool_tokens", "requests", "gets_in"),
    [
        ("fcfs", 1003, TOGETHER, "beside"),  # 2 x (100 + 400 + 1) tokens are set aside
        ("fcfs", 1002, TOGETHER, "next"),  # then the first counts with 0.7 of its cap only
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


def test_no_more_requests_wait_than_the_engine_allows() -> None:
    engine = replace(SMALL, max_running_requests=1, max_queued_requests=2)
    result = simulate(engine, "fcfs", CONFIG, [request(0.01 * i, 10, 50) for i in range(5)])
    assert (result.num_refused, len(result.ttlt_s)) == (2, 3)
