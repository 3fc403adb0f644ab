"""How fast requests start under flow control."""

from __future__ import annotations

import math
from dataclasses import replace

from bench.policies.flow import Flow, FlowParameters
from sage_sched.job import Job
from tests.sage_sched.strategies import IDLE, SERVER


def job(arrival: int, generated_tokens: int = 0) -> Job:
    found = Job(arrival, 100, 1000, None, 0)
    found.grow(generated_tokens)
    return found


def test_requests_start_as_fast_as_their_memory_fills_the_pool() -> None:
    flow = Flow(FlowParameters(share=1.0), SERVER)
    ended, lasting = job(0, 100), job(1, 100)
    queue = [job(arrival) for arrival in (5, 4, 3, 2)]

    def may_start(*running: Job) -> list[int]:
        view = replace(IDLE, running=running, waiting=queue)
        flow.on_pass(view)
        return sorted(one.arrival for one in queue if flow.key(one, view) < math.inf)

    # Until one has ended nothing is known, and all may.
    assert may_start(ended, lasting) == [2, 3, 4, 5]
    # It held 100 * (100 + 50) token-steps of a pool of 10,000: two start in three steps.
    assert may_start(lasting) == []
    lasting.grow(103)
    assert may_start(lasting) == [2, 3]
    started = queue.pop()
    started.grow(1)
    assert may_start(lasting, started) == [3]
