"""SGLang's admission, refused requests, and adapters."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.simulator.pool import KvPool
from bench.simulator.presets import PRESETS
from bench.simulator.request import Progress, SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from sage_sched.job import Hints, Job
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, known, request

ROOMY = replace(SMALL, kv_pool_tokens=65536, page_size=1, max_prefill_tokens=8192)
TOGETHER = [request(0.0, 100, 3), request(0.0, 100, 1)]
# The second comes while the first runs, which holds some 100 tokens and has 398 to go.
APART = [request(0.0, 100, 200), request(0.05, 100, 1)]
CHUNKED = [request(0.0, 600, 10), request(0.0, 100, 10)]


@pytest.mark.parametrize(
    ("policy", "pool_tokens", "requests", "gets_in"),
    [
        ("fcfs", 1003, TOGETHER, "beside"),  # sets 2 x (100 + 400 + 1) tokens aside
        ("fcfs", 1002, TOGETHER, "next"),  # the first then counts with 0.7 of its cap
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


ENGINE = replace(PRESETS["h800-qwen3-32b"], max_loras_per_batch=1)


@pytest.mark.parametrize("preempt", [True, False])
@pytest.mark.parametrize(
    "policy", ["sage", "urgency", "qllm", "fcfs-fill", "proserve", "ltr", "ssjf"]
)
def test_no_request_starves_for_an_adapter(policy: str, preempt: bool) -> None:
    """Six requests of adapter b come from 30 s on. Requests of adapter a never run out, and take a
    third of the server's capacity."""
    rng = random.Random(0)
    hints = Hints(urgency=1, ttft_slo_ms=1000.0)
    of_b = [
        request(at_s, 500, 20, 1000, distribution=known(20), hints=hints, adapter="b")
        for at_s in range(30, 60, 5)
    ]
    of_a = []
    for second in range(100):
        at_s, length = second + rng.random(), rng.randint(50, 300)
        said = {"distribution": known(*[length] * 8), "hints": Hints(ttft_slo_ms=5000.0)}
        of_a.append(request(at_s, 500, length, 1000, adapter="a", **said))
    requests = sorted([*of_a, *of_b], key=lambda each: each.arrival_s)
    result = simulate(ENGINE, policy, CONFIG, requests, Options(preempt=preempt))
    ttft_s = dict(zip(map(id, requests), result.ttft_s.tolist(), strict=True))
    assert max(ttft_s[id(each)] for each in of_b) < 60
    # The queue closes for each request of b anew, not at once.
    assert sum(ttft_s[id(each)] for each in of_a) < len(of_a)


def swapped_out(num_tokens: int) -> Progress:
    """A request with the KV of this many tokens of a document that others may share."""
    asked = request(0.0, num_tokens, 9, 9, spans=((1, 0, num_tokens),))
    progress = Progress(asked, 0, Job(0, num_tokens, 9, None, 0))
    progress.job.grow(1)
    progress.swapped = True
    return progress


@pytest.mark.parametrize(("held_tokens", "has_room"), [(4, True), (5, False)])
@pytest.mark.parametrize("cached_tokens", [0, 3])
def test_a_request_comes_back_if_all_of_it_fits(
    held_tokens: int, has_room: bool, cached_tokens: int
) -> None:
    pool, returning = KvPool(10, 1), swapped_out(6)
    if cached_tokens:  # another request has left a part in the tree
        other = swapped_out(cached_tokens)
        pool.hold(cached_tokens)
        pool.publish(other, cached_tokens)
        pool.leave(other)
    pool.hold(held_tokens)
    before = pool.room_tokens
    assert pool.take_back(returning) is has_room
    assert pool.room_tokens == (0 if has_room else before)
