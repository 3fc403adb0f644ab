from __future__ import annotations

import gc
import time
from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler

from patches.scheduler import kv_copy
from patches.scheduler.executor import run_pass, timed_out, without_started
from patches.scheduler.preemption import Preemption
from patches.scheduler.request import Waits
from sage_sched.gap import Gap
from sage_sched.plan import Budget, Preempt
from sage_sched.policies.sage import Sage
from sage_sched.starts import Starts
from sage_sched.view import SchedulerView
from tests.checks.full_server import FullServer


def test_a_policy_that_fails_at_the_plan_costs_the_plan_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FullServer(num_waiting=5, num_newcomers=1)
    server.step()
    expected = server.take_pass()

    def fail(self: Sage, *args: object) -> bool:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Sage, "should_preempt", fail)
    for request in server.batch.reqs:
        request.output_ids.extend([0] * 1500)  # longer than foreseen, so the worst of all
    server.state.jobs.num_arrivals += 1
    by_arrival = sorted(expected, key=lambda request: request.sage.job.arrival)
    assert server.take_pass() == by_arrival
    assert server.state.stats()["num_policy_errors"] == 1


def test_nothing_of_a_view_outlives_its_pass() -> None:
    # Requests would live on through it, and their KV in host memory.
    server = FullServer(num_waiting=5, num_newcomers=1)
    for request in server.batch.reqs:
        request.output_ids.extend([0] * 1500)  # so that the policy weighs who yields
    server.step()
    server.take_pass()
    ours = {request.sage.job for request in server.batch.reqs}
    gc.collect()
    views = [found for found in gc.get_objects() if type(found) is SchedulerView]
    assert not [view for view in views if ours & {*view.running}]


def test_one_that_cannot_leave_after_all_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FullServer(num_waiting=5, num_newcomers=0)
    best = server.batch.reqs.pop(0)
    best.output_ids = array("q")
    best.sage.job.grow(0)
    server.scheduler.waiting_queue.insert(0, best)
    server.scheduler.token_to_kv_pool_allocator.available_size = lambda: 10**6
    asked: list[Any] = []

    def fail(self: Preemption, running_batch: Any, action: Preempt) -> None:
        asked.append(action.job)

    monkeypatch.setattr(Preemption, "host_free_tokens", lambda self, in_host_memory: 10**6)
    monkeypatch.setattr(Preemption, "preempt", fail)
    monkeypatch.setattr(Sage, "should_preempt", lambda *args: True)
    monkeypatch.setattr(Starts, "look", lambda self, view: None)
    expected = list(server.scheduler.waiting_queue)
    assert server.take_pass() == expected
    assert len(asked) == 1
    # What others had freed for its sake is given away before the next step.
    assert not server.batch.batch_is_full
    server.take_pass()
    assert len(asked) == 2


def test_on_a_release_that_keeps_them_so_long_those_that_have_ended_are_not_in_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FullServer(num_waiting=5, num_newcomers=1)
    ended, others = server.batch.reqs[0], server.batch.reqs[1:]

    def filter_batch() -> None:
        server.batch.reqs = [request for request in server.batch.reqs if request is not ended]

    server.batch.filter_batch = filter_batch
    for release, left in (("0.5.23", [ended, *others]), ("0.5.22", others)):
        monkeypatch.setattr("sglang.version.__version__", release)
        server.batch.batch_is_full = True
        server.take_pass()
        assert server.batch.reqs == left
    assert not server.batch.batch_is_full


# Seconds since each request's start, for which it ran since, and since its latest entry into the
# queue; and whether it is away.
_WAITS, _WAITS_LONG, _AWAY_LONG = (0, 0, 5, False), (0, 0, 500, False), (500, 20, 400, True)
_RUNS, _RUNS_LONG, _BACK = (20, 20, 30, False), (500, 500, 510, False), (500, 20, 40, False)


@pytest.mark.parametrize("waiting_s", [-1.0, 100.0])
@pytest.mark.parametrize("running_s", [-1.0, 100.0])
def test_sglangs_timeouts_do_not_count_the_time_that_a_request_was_away(
    monkeypatch: pytest.MonkeyPatch, waiting_s: float, running_s: float
) -> None:
    server = FullServer(num_waiting=3, num_newcomers=0)
    scheduler, queue = server.scheduler, server.scheduler.waiting_queue
    del server.batch.reqs[3:]
    scheduler._collect_inflight_batches = lambda: [server.batch, None]
    now_s = time.monotonic()
    situation = (_WAITS, _WAITS_LONG, _AWAY_LONG, _RUNS, _RUNS_LONG, _BACK)
    requests = [*queue, *server.batch.reqs]
    for i, (request, times) in enumerate(zip(requests, situation, strict=True)):
        started_s, ran_s, queued_s, is_away = times
        request.rid = f"{i}"
        request.time_stats = SimpleNamespace(
            wait_queue_entry_time=time.perf_counter() - queued_s,
            forward_entry_time=time.perf_counter() - started_s if started_s else 0.0,
        )
        request.sage.waits = Waits(came_s=now_s - started_s, waited_s=started_s - ran_s)
        if is_away:
            request.sage.job.num_preemptions = 1
            request.sage.waits = Waits(now_s - started_s, since_s=now_s - queued_s)
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", f"{waiting_s}")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", f"{running_s}")
    before = [*queue]
    aborted = timed_out(scheduler, partial(Scheduler._poll_timeout_aborts, scheduler))
    late = [_WAITS_LONG] * (waiting_s > 0) + [_RUNS_LONG] * (running_s > 0)
    assert [situation[int(abort.rid)] for abort in aborted] == late
    assert scheduler.waiting_queue is queue
    assert queue == before


def test_one_that_a_full_queue_drops_for_a_more_important_one_is_gone() -> None:
    server = FullServer(num_waiting=6, num_newcomers=0)
    before = list(server.scheduler.waiting_queue)
    for request in before[::2]:
        request.kv.retraction_backup = object()
    dropped = without_started(server.scheduler, lambda: server.scheduler.waiting_queue.pop(1))
    assert dropped is before[3]
    assert server.scheduler.waiting_queue == [*before[:3], *before[4:]]


@pytest.mark.parametrize(
    ("is_idle", "num_swapped", "num_queued"), [(True, 0, 5), (False, 0, 6), (True, 2, 4)]
)
def test_the_first_to_come_to_an_idle_server_does_not_queue(
    is_idle: bool, num_swapped: int, num_queued: int
) -> None:
    server = FullServer(num_waiting=6, num_newcomers=0)
    before = list(server.scheduler.waiting_queue)
    for request in before[1 : 1 + num_swapped]:
        request.kv.retraction_backup = object()
    server.scheduler.is_fully_idle = lambda ignore_waiting: is_idle and ignore_waiting
    seen = without_started(server.scheduler, lambda: list(server.scheduler.waiting_queue))
    assert len(seen) == num_queued
    assert (before[0] in seen) == (not is_idle or num_swapped > 0)
    assert server.scheduler.waiting_queue == before


def test_a_pass_obeys_its_budget_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FullServer(num_waiting=3, num_newcomers=0)
    server.batch.batch_is_full = False
    server.scheduler.page_size = 16
    seen: list[tuple[int, int, int | None]] = []

    def original(batch: Any) -> Any:
        scheduler = server.scheduler
        limits = (scheduler.max_prefill_tokens, scheduler.chunked_prefill_size)
        seen.append((*limits, server.state.chunk_limit_tokens))
        return SimpleNamespace(running_batch=batch, batch_to_run="a prefill")

    def budget(self: Sage, view: SchedulerView) -> Budget:
        return Budget(prefill_tokens=100, chunk_tokens=50)

    server.state.limits.gap = Gap()  # none for those that run
    with monkeypatch.context() as patch:
        patch.setattr(Sage, "budget", budget)
        run_pass(server.scheduler, original, server.batch)
    run_pass(server.scheduler, original, server.batch)
    assert seen == [(96, 96, 48), (16384, 8192, None)]


def test_decode_only_runs_no_prefill_and_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FullServer(num_waiting=3, num_newcomers=0)
    server.batch.batch_is_full = False
    before = list(server.scheduler.waiting_queue)
    monkeypatch.setattr(Sage, "budget", lambda self, view: Budget(prefill_tokens=0))
    seen: list[Any] = []
    run_pass(
        server.scheduler, lambda batch: seen.extend(server.scheduler.waiting_queue), server.batch
    )
    assert seen == []
    server.scheduler.chunked_req = server.scheduler.waiting_queue.pop()
    done = run_pass(server.scheduler, lambda batch: pytest.fail("a chunk"), server.batch)
    assert done.batch_to_run is None
    assert done.running_batch is server.batch
    left = [*server.scheduler.waiting_queue, server.scheduler.chunked_req]
    assert sorted(map(id, left)) == sorted(map(id, before))


def test_while_decode_alone_might_run_out_of_memory_the_chunk_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FullServer(num_waiting=3, num_newcomers=0)
    server.batch.batch_is_full = False
    server.scheduler.chunked_req = server.scheduler.waiting_queue.pop()
    monkeypatch.setattr(Sage, "budget", lambda self, view: Budget(prefill_tokens=0))
    server.batch.check_decode_mem = lambda: False
    went_on: list[Any] = []

    def original(batch: Any) -> Any:
        went_on.append(batch)
        return SimpleNamespace(running_batch=batch)

    server.scheduler.token_to_kv_pool_allocator.available_size = lambda: 10**6
    run_pass(server.scheduler, original, server.batch)
    assert went_on == [server.batch]


@pytest.mark.parametrize(
    ("free_tokens", "num_streaming", "is_hybrid", "num_left", "goes_on"),
    [
        (1003, 0, False, 3, True),
        (1002, 0, False, 2, True),
        (400, 0, False, 1, True),
        (100, 0, False, 0, True),
        (100, 2, False, 2, False),
        (3, 0, True, 3, True),  # there SGLang lets a chunk wait
        (2, 0, True, 2, True),
    ],
)
def test_the_last_of_the_order_leave_before_a_chunk_that_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
    free_tokens: int,
    num_streaming: int,
    is_hybrid: bool,
    num_left: int,
    goes_on: bool,
) -> None:
    server = FullServer(num_waiting=3, num_newcomers=0)
    scheduler, batch, state = server.scheduler, server.batch, server.state
    chunked = scheduler.chunked_req = scheduler.waiting_queue.pop()
    chunked.origin_input_ids, chunked.prefix_len = array("q", [0]) * 1200, 200
    state.preemption, scheduler.is_hybrid_swa = None, is_hybrid
    batch.reqs = batch.reqs[:3]
    keep = [batch.reqs[p] for p in state.retention_order(batch.reqs, range(3))]
    for request in keep[:num_streaming]:  # its session keeps its KV
        request.session = SimpleNamespace(streaming=True)
    released: list[Any] = []

    def room_tokens() -> int:
        return free_tokens + 400 * sum(request is not chunked for request in released)

    def filter_batch(*, keep_indices: list[int]) -> None:
        batch.reqs = [batch.reqs[index] for index in keep_indices]

    def release(request: Any, *args: Any, **kw: Any) -> None:
        released.append(request)

    scheduler.token_to_kv_pool_allocator.available_size = room_tokens
    batch.check_decode_mem = lambda: room_tokens() >= len(batch.reqs)
    batch.filter_batch = filter_batch
    batch.release_req = lambda index, *args, **kw: release(batch.reqs[index])
    batch._get_decode_retraction_order = lambda reqs: state.retention_order(reqs, range(len(reqs)))
    monkeypatch.setattr(kv_copy, "release_kv_cache", release)
    seen: list[Any] = []

    def original(batch: Any) -> Any:
        seen.append([*batch.reqs])
        return SimpleNamespace(running_batch=batch)

    run_pass(scheduler, original, batch)
    gone = [*keep[num_left:][::-1], *([] if goes_on else [chunked])]
    assert seen == [[request for request in batch.reqs if request in keep[:num_left]]]
    assert len(batch.reqs) == num_left
    assert released == gone
    assert scheduler.waiting_queue[2:] == gone
    assert (scheduler.chunked_req is chunked) == goes_on


def test_a_budget_is_for_prefill_beside_rows_that_are_mixed_in_and_in_whole_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FullServer(num_waiting=3, num_newcomers=0)
    server.batch.batch_is_full = False
    scheduler = server.scheduler
    scheduler.page_size, scheduler.truncation_align_size, scheduler.is_mixed_chunk = 16, 24, True
    monkeypatch.setattr(Sage, "budget", lambda self, view: Budget(50, 30))
    seen: list[tuple[int, int, int | None]] = []

    def original(batch: Any) -> Any:
        limits = (scheduler.max_prefill_tokens, scheduler.chunked_prefill_size)
        seen.append((*limits, server.state.chunk_limit_tokens))
        return SimpleNamespace(running_batch=batch)

    run_pass(scheduler, original, server.batch)
    rows = len(server.batch.reqs)
    assert seen == [(48 + rows, 48 + rows, 48)]


@pytest.mark.parametrize("runs_any", [True, False])
def test_others_may_enter_past_a_swapped_one_without_room_if_nobody_runs(
    monkeypatch: pytest.MonkeyPatch, runs_any: bool
) -> None:
    server = FullServer(num_waiting=4, num_newcomers=0)
    scheduler = server.scheduler
    server.batch.reqs = server.batch.reqs[:runs_any]
    server.batch.batch_is_full = False
    scheduler.get_num_allocatable_reqs = lambda num_running, running_batch: 10
    scheduler.token_to_kv_pool_allocator.available_size = lambda: 10**6
    first, *others = scheduler.waiting_queue
    first.output_ids, first.kv.retraction_backup = array("q", [1]), object()

    def no_room(self: Preemption, running_batch: Any, reqs: Any) -> Any:
        assert reqs == [first]
        return running_batch, list(reqs)

    monkeypatch.setattr(Preemption, "resume", no_room)
    seen: list[Any] = []

    def original(batch: Any) -> Any:
        seen.extend(scheduler.waiting_queue)
        return SimpleNamespace(running_batch=batch)

    run_pass(scheduler, original, server.batch)
    assert seen == ([] if runs_any else others)
    assert sorted(map(id, scheduler.waiting_queue)) == sorted(map(id, [first, *others]))


def test_what_joins_the_queue_after_the_plan_waits_for_the_next() -> None:
    server = FullServer(num_waiting=3, num_newcomers=1)
    server.batch.batch_is_full = False
    scheduler, late = server.scheduler, server._newcomers[0]
    before = list(scheduler.waiting_queue)

    def original(batch: Any) -> Any:
        scheduler.waiting_queue.append(late)  # its grammar is ready
        server.state.hide_unplanned(scheduler.waiting_queue)
        assert late not in scheduler.waiting_queue
        return SimpleNamespace(running_batch=batch)

    run_pass(scheduler, original, server.batch)
    assert sorted(map(id, scheduler.waiting_queue)) == sorted(map(id, [*before, late]))
    server.state.hide_unplanned(scheduler.waiting_queue)  # outside a pass nothing is hidden
    assert late in scheduler.waiting_queue
