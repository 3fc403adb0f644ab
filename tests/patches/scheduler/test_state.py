from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from patches.messages import StepTimes
from patches.scheduler import request
from patches.scheduler.request import Waits
from patches.scheduler.view import is_short
from sage_sched.policies.sage import Sage
from sage_sched.preemption import lacks_memory
from tests.patches.schedulers import Server, StandInBatch, make_request

LONG, SHORT = [900] * 9, [10] * 9


def fail(*args: object) -> Any:
    raise ZeroDivisionError("a bug")


def test_each_wait_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=lambda: now_s)
    monkeypatch.setattr(request, "time", clock)
    waits = Waits(came_s=0.0, since_s=0.0)
    # SGLang retracts it at 5, and we preempt it at 11. Each time it runs again in two chunks.
    events = ((3, 0), (9, 5), (10, 5), (11, None), (14, 11), (15, 11))
    for at_s, stamp_s in events:
        now_s = float(at_s)
        if stamp_s is None:
            waits.begins()
            continue
        waits.was_retracted(stamp_s)
        waits.ends()
    now_s = 20.0
    assert (waits.so_far_s(), waits.ran_s()) == (3 + 4 + 3, 10)


def test_a_request_has_its_age_after_steps_without_a_plan(server: Server) -> None:
    (req,) = server.queue(make_request([50] * 9, answer_tokens=3))
    server.ordered()
    req.output_ids.extend([1] * 5)
    server.hooks["_add_request_to_queue"](lambda *given: None, server.scheduler, req)
    assert req.sage.job.generated_tokens == 8
    req.output_ids.append(1)
    server.state.end(req, was_aborted=False)
    assert req.sage.job.generated_tokens == 9


def test_a_policy_that_returns_no_next_plan_fails_in_each_pass(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = server.queue(make_request(LONG), make_request(SHORT))
    monkeypatch.setattr(Sage, "on_pass", lambda policy, view, queue: None)
    for num_errors in (1, 2):
        assert server.ordered(queue) == queue
        assert server.stats()["num_policy_errors"] == num_errors
        assert isinstance(server.state.core.may_have_changed(0, [1], 1), bool)


def test_if_the_policy_fails_plans_are_first_come_first_served(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long_one, short_one = queue = server.queue(make_request(LONG), make_request(SHORT))
    assert server.ordered() == [short_one, long_one]
    assert server.state.retention_order(queue, [0, 1]) == [1, 0]
    for name in ("key", "rank", "on_server", "on_end"):
        monkeypatch.setattr(Sage, name, fail)
    for req in queue:
        req.output_ids = array("q", [1])  # retracted, so ranked anew
    for _ in range(3):
        assert server.ordered(queue[::-1]) == [long_one, short_one]
    assert server.state.retention_order(queue, [0, 1]) == [0, 1]
    assert server.stats()["num_policy_errors"] == 4
    assert len(caplog.records) == 1
    (newcomer,) = server.arrive(make_request([10]))
    assert newcomer.sage.job.goes_first
    server.state.updated(StepTimes(seconds=[1.0] * 7, source="learned"))
    server.state.end(newcomer, was_aborted=False)
    assert server.stats()["num_policy_errors"] == 7
    monkeypatch.undo()
    assert server.ordered(queue) == [short_one, long_one]


def test_an_answer_that_would_begin_anew_is_retracted_last(server: Server) -> None:
    reqs = server.arrive(*(make_request([n] * 9) for n in (10, 300, 900)))
    reqs[2].input_embeds = [[0.0]]
    assert server.state.retention_order(reqs, [0, 1, 2]) == [2, 0, 1]


def test_drafts_after_the_end_of_a_request_are_no_work_for_it(server: Server) -> None:
    ends, goes_on = server.arrive(make_request(SHORT), make_request(SHORT))
    batch = StandInBatch([ends, goes_on])
    result = SimpleNamespace(accept_lens=torch.tensor([3, 2]))
    for _ in range(2):  # under overlap it is in one more step
        goes_on.output_ids.extend([1, 1])
        server.state.stepped(batch, result)
        ends.finished_reason = "stop"
        server.state.end_finished([ends])
    server.state.stepped(StandInBatch([goes_on], prefills=True), result)  # its first token
    assert ends.sage.job.served_tokens == 2
    assert server.stats()["served_tokens"] == 2 + 1 + 1
    # The tokens of its first step have no gap before them.
    assert server.stats()["gaps"]["stayed"]["num"] == 2


def test_memory_is_not_short_if_a_last_token_is_on_its_way(server: Server) -> None:
    ending, other = server.arrive(make_request([9]), make_request([9]))
    batch, scheduler = StandInBatch([ending, other]), server.scheduler
    scheduler.token_to_kv_pool_allocator.available_size = lambda: 1
    for in_flight, expected in (([], True), ([ending], False)):
        scheduler._reqs_finishing_inflight = lambda batch, found=in_flight: found
        assert is_short(scheduler, batch) is lacks_memory(server.state.view(batch)) is expected
    scheduler._reqs_finishing_inflight = lambda batch: []
    for evictable, expected in ((1, False), (2, False), (0, True)):
        scheduler.tree_cache.evictable_size = lambda number=evictable: number
        assert is_short(scheduler, batch) is lacks_memory(server.state.view(batch)) is expected
    # Drafts take more than a token.
    scheduler.token_to_kv_pool_allocator.available_size = lambda: 2
    scheduler.spec_algorithm = SpeculativeAlgorithm.EAGLE
    batch.new_tokens_required_next_decode = lambda: 8
    assert is_short(scheduler, batch)
