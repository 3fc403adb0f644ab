from __future__ import annotations

from typing import Any

import pytest
from patches.mover import Mover

from bench.queue_pass import FullServer
from sage_sched.policies.sage import SagePolicy


def test_a_policy_that_fails_at_the_plan_costs_the_plan_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FullServer(num_waiting=5, num_newcomers=1)
    server.step()
    expected = server.take_turns()

    def fail(self: SagePolicy, *args: object) -> bool:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SagePolicy, "yields", fail)
    for request in server.running:
        request.output_ids += [0] * 1500  # longer than foreseen, so the worst of all
    server.ranker.num_arrivals += 1
    assert server.take_turns() == expected
    assert server.ranker.stats()["num_policy_errors"] == 1


def test_one_that_cannot_leave_after_all_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FullServer(num_waiting=5, num_newcomers=0)
    best = server.running.pop(0)
    best.output_ids = []
    server.waiting.insert(0, best)
    server.scheduler.token_to_kv_pool_allocator.available_size = lambda: 10**6
    asked: list[Any] = []

    def fail(self: Mover, running_batch: Any, req: Any, host_tokens: int) -> bool:
        asked.append(req)
        return False

    monkeypatch.setattr(Mover, "price_s", lambda self, req, host_tokens: 0.0)
    monkeypatch.setattr(Mover, "leave", fail)
    expected = list(server.waiting)
    assert server.take_turns() == expected
    assert len(asked) == 1
    # What others had freed for its sake is given away before the next step.
    assert not server.batch.batch_is_full
    server.take_turns()
    assert len(asked) == 2


def test_who_looks_at_the_queue_without_the_swapped_leaves_it_as_it_was() -> None:
    server = FullServer(num_waiting=6, num_newcomers=0)
    for request in server.waiting[::2]:
        request.kv.retraction_backup = object()
    queue, before = server.scheduler.waiting_queue, list(server.waiting)
    seen = server.turns.without_swapped(lambda: list(server.scheduler.waiting_queue))
    assert seen == before[1::2]
    assert server.scheduler.waiting_queue is queue
    assert queue == before
