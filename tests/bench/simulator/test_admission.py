"""SGLang's admission, refused requests, and prefills that let others pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from sage_sched.app.config import SageConfig
from sage_sched.job import Hints
from sage_sched.steps import StepTime
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, known, mixed, request

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


def test_refusals_end_with_the_predictor_and_with_the_overload() -> None:
    deadlines = {"max_ttft_ms": 1000.0, "max_tpot_ms": 100.0}
    protected = SageConfig.parse({"overload": {"enabled": True, **deadlines}})
    requests = mixed(900, 9.0, 6)
    phases = [
        requests[:300],
        [replace(each, distribution=None) for each in requests[300:600]],  # the predictor is dead
        requests[600:],
        [replace(each, arrival_s=5000.0) for each in mixed(2000, 1.0, 7)],
        [replace(each, arrival_s=each.arrival_s + 9000.0) for each in mixed(100, 0.7, 8)],
    ]
    result = simulate(SMALL, "sage", protected, [*chain(*phases)], CHECKED)
    admitted = {*result.arrival_s.tolist()}
    num_refused = [sum(each.arrival_s not in admitted for each in phase) for phase in phases]
    assert min(num_refused[0], num_refused[2]) > 30
    assert num_refused[1] == num_refused[4] == 0


def test_no_more_requests_wait_than_the_engine_allows() -> None:
    engine = replace(SMALL, max_running_requests=1, max_queued_requests=2)
    result = simulate(engine, "fcfs", CONFIG, [request(0.01 * i, 10, 50) for i in range(5)])
    assert (result.num_refused, len(result.ttlt_s)) == (2, 3)


# A prefill takes 0.1 s and 1 ms a token, a decode step 0.1 s.
SLICED = Engine(StepTime(0.1, 0.0, 0.001, 0.0, 0.1, 0.0, 0.0), 100_000, 8, slices=10)


def asked(at_s: float, urgency: int, input_tokens: int, output_tokens: int = 1) -> SimRequest:
    hints = Hints(urgency=urgency)
    return request(at_s, input_tokens, output_tokens, 8, distribution=known(2, 4), hints=hints)


LONG, SENSITIVE = asked(0.0, 3, 900), asked(0.25, 2, 100)  # 1 s, cut every 0.1 s


@pytest.mark.parametrize(
    ("engine", "first", "late", "waits_s"),
    [
        (SLICED, LONG, SENSITIVE, 0.05),
        (replace(SLICED, slices=1), LONG, SENSITIVE, 0.75),
        (SLICED, asked(0.0, 1, 900), SENSITIVE, 0.75),  # a sensitive prompt is not cut
        (SLICED, LONG, asked(0.25, 3, 100), 0.75),  # best effort does not pass
    ],
)
def test_a_newcomer_waits_for_the_next_cut(
    engine: Engine, first: SimRequest, late: SimRequest, waits_s: float
) -> None:
    result = simulate(engine, "qllm", CONFIG, [first, late], CHECKED)
    assert result.ttft_s == pytest.approx([1.2 if waits_s < 0.1 else 1.0, waits_s + 0.2])
