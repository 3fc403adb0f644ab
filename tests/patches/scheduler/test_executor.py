"""A pass of SGLang's scheduler by a plan of ours."""

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
from tests.patches.scheduler.test_state import fail


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether these are the same requests in any order."""
    return sorted(map(id, some)) == sorted(map(id, others))


@pytest.fixture
def full() -> FullServer:
    """Its slots are full."""
    return FullServer(num_waiting=5, num_newcomers=1)


@pytest.fixture
def roomy() -> FullServer:
    """Some of its slots are free."""
    server = FullServer(num_waiting=4, num_newcomers=1)
    server.batch.batch_is_full = False
    return server


def test_a_policy_error_costs_one_plan(full: FullServer, monkeypatch: pytest.MonkeyPatch) -> None:
    full.next_step()
    expected = [*full.take_pass()]
    monkeypatch.setattr(Sage, "should_preempt", fail)
    for request in full.batch.reqs:
        request.output_ids.extend([0] * 1500)  # longer than predicted, so the worst of all
    full.state.jobs.num_arrivals += 1
    assert full.take_pass() == sorted(expected, key=lambda request: request.sage.job.arrival)
    assert full.stats()["num_policy_errors"] == 1


def test_nothing_of_a_view_outlives_its_pass(full: FullServer) -> None:
    # Requests would live on through it, and their KV in host memory.
    for request in full.batch.reqs:
        request.output_ids.extend([0] * 1500)  # so that the policy weighs which to preempt
    full.next_step()
    full.take_pass()
    ours = {request.sage.job for request in full.batch.reqs}
    gc.collect()
    views = [found for found in gc.get_objects() if type(found) is SchedulerView]
    assert not [view for view in views if ours & {*view.running}]


def test_a_failed_move_costs_no_slot(full: FullServer, monkeypatch: pytest.MonkeyPatch) -> None:
    best = full.batch.reqs.pop(0)
    best.output_ids = array("q")
    best.sage.job.grow(0)
    full.waiting.insert(0, best)
    full.set_free(10**6)
    asked: list[Any] = []

    def not_taken_out(self: Preemption, running_batch: Any, action: Preempt) -> None:
        asked.append(action.job)

    monkeypatch.setattr(Preemption, "host_free_tokens", lambda self, in_host_memory: 10**6)
    monkeypatch.setattr(Preemption, "preempt", not_taken_out)
    monkeypatch.setattr(Sage, "should_preempt", lambda *args: True)
    monkeypatch.setattr(Starts, "update", lambda self, view: None)
    expected = [*full.waiting]
    assert full.take_pass() == expected
    assert len(asked) == 1
    # What others had freed for its sake is given away before the next step.
    assert not full.batch.batch_is_full
    full.take_pass()
    assert len(asked) == 2


def test_ended_requests_are_in_no_plan(full: FullServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang 0.5.22 keeps them in the running batch until after the pass.
    ended, others = full.batch.reqs[0], full.batch.reqs[1:]

    def filter_batch() -> None:
        full.batch.reqs = [request for request in full.batch.reqs if request is not ended]

    full.batch.filter_batch = filter_batch
    for release, left in (("0.5.23", [ended, *others]), ("0.5.22", others)):
        monkeypatch.setattr("sglang.version.__version__", release)
        full.batch.batch_is_full = True
        full.take_pass()
        assert full.batch.reqs == left
    assert not full.batch.batch_is_full


# Seconds since each request's start, for which it ran since, and since its latest entry into the
# queue; and whether it was preempted.
_WAITS, _WAITS_LONG, _AWAY_LONG = (0, 0, 5, False), (0, 0, 500, False), (500, 20, 400, True)
_RUNS, _RUNS_LONG, _BACK = (20, 20, 30, False), (500, 500, 510, False), (500, 20, 40, False)


@pytest.mark.parametrize("waiting_s", [-1.0, 100.0])
@pytest.mark.parametrize("running_s", [-1.0, 100.0])
def test_sglangs_timeouts_do_not_count_the_time_after_a_preemption(
    monkeypatch: pytest.MonkeyPatch, waiting_s: float, running_s: float
) -> None:
    server = FullServer(num_waiting=3, num_newcomers=0)
    scheduler, queue = server.scheduler, server.waiting
    del server.batch.reqs[3:]
    now_s = time.monotonic()
    situation = (_WAITS, _WAITS_LONG, _AWAY_LONG, _RUNS, _RUNS_LONG, _BACK)
    requests = [*queue, *server.batch.reqs]
    for i, (request, times) in enumerate(zip(requests, situation, strict=True)):
        started_s, ran_s, queued_s, is_preempted = times
        request.rid = f"{i}"
        request.time_stats = SimpleNamespace(
            wait_queue_entry_time=time.perf_counter() - queued_s,
            forward_entry_time=time.perf_counter() - started_s if started_s else 0.0,
        )
        request.sage.waits = Waits(came_s=now_s - started_s, waited_s=started_s - ran_s)
        if is_preempted:
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


def test_a_request_that_sglang_drops_at_the_limit_on_the_queue_is_gone(full: FullServer) -> None:
    before = [*full.waiting]
    for request in before[::2]:
        request.kv.retraction_backup = object()
    assert without_started(full.scheduler, lambda: full.waiting.pop(1)) is before[3]
    assert full.waiting == [*before[:3], *before[4:]]


@pytest.mark.parametrize(
    ("is_idle", "num_swapped", "num_queued"), [(True, 0, 4), (False, 0, 5), (True, 2, 3)]
)
def test_the_limit_counts_neither_swapped_requests_nor_the_first_on_an_idle_server(
    full: FullServer, is_idle: bool, num_swapped: int, num_queued: int
) -> None:
    before = [*full.waiting]
    for request in before[1 : 1 + num_swapped]:
        request.kv.retraction_backup = object()
    full.scheduler.is_fully_idle = lambda ignore_waiting: is_idle and ignore_waiting
    seen = without_started(full.scheduler, lambda: [*full.waiting])
    assert len(seen) == num_queued
    assert (before[0] in seen) == (not is_idle or num_swapped > 0)
    assert full.waiting == before


@pytest.mark.parametrize(
    ("budget", "attributes", "num_mixed", "expected"),
    [
        (Budget(prefill_tokens=100, chunk_tokens=50), {"page_size": 16}, 0, (96, 48)),
        # Each decoding request takes a row.
        (
            Budget(50, 30),
            {"page_size": 16, "truncation_align_size": 24, "is_mixed_chunk": True},
            256,
            (48, 48),
        ),
        (None, {}, 0, (16384, None)),
    ],
)
def test_a_pass_keeps_to_its_budget_in_whole_units(
    roomy: FullServer,
    monkeypatch: pytest.MonkeyPatch,
    budget: Budget | None,
    attributes: dict[str, Any],
    num_mixed: int,
    expected: tuple[int, int | None],
) -> None:
    scheduler, seen = roomy.scheduler, []
    vars(scheduler).update(attributes)
    roomy.state.limits.gap = Gap()  # no gap bound
    monkeypatch.setattr(Sage, "budget", lambda self, view: budget)

    def note(batch: Any) -> None:
        limit = roomy.hooks["shortest_prefill_chunk_limit"](lambda: None)
        seen.append((scheduler.max_prefill_tokens, scheduler.chunked_prefill_size, limit))

    roomy.take_pass(note)
    prefill_tokens, chunk_tokens = expected
    most = prefill_tokens + num_mixed
    assert seen == [(most, min(most, 8192), chunk_tokens)]
    assert (scheduler.max_prefill_tokens, scheduler.chunked_prefill_size) == (16384, 8192)
    assert roomy.hooks["shortest_prefill_chunk_limit"](lambda: 5) == 5


def test_decoding_only_loses_nothing(roomy: FullServer, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = [*roomy.waiting], []
    monkeypatch.setattr(Sage, "budget", lambda self, view: Budget(prefill_tokens=0))
    roomy.take_pass(lambda batch: seen.extend(roomy.waiting))
    assert seen == []
    roomy.scheduler.chunked_req = roomy.waiting.pop()
    done = run_pass(roomy.scheduler, lambda batch: pytest.fail("a chunk"), roomy.batch)
    assert done.batch_to_run is None
    assert done.running_batch is roomy.batch
    assert same([*roomy.waiting, roomy.scheduler.chunked_req], before)


def test_a_chunk_goes_on_without_room(roomy: FullServer, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy.scheduler.chunked_req = roomy.waiting.pop()
    monkeypatch.setattr(Sage, "budget", lambda self, view: Budget(prefill_tokens=0))
    roomy.batch.check_decode_mem = lambda: False
    went_on: list[Any] = []
    roomy.set_free(10**6)
    roomy.take_pass(went_on.append)
    assert went_on == [roomy.batch]


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
def test_the_last_of_the_order_leave_before_a_chunk_without_room(
    monkeypatch: pytest.MonkeyPatch,
    free_tokens: int,
    num_streaming: int,
    is_hybrid: bool,
    num_left: int,
    goes_on: bool,
) -> None:
    server = FullServer(num_waiting=3, num_newcomers=0)
    scheduler, batch, state = server.scheduler, server.batch, server.state
    chunked = scheduler.chunked_req = server.waiting.pop()
    chunked.origin_input_ids, chunked.prefix_len = array("q", [0]) * 1200, 200
    state.preemption, scheduler.is_hybrid_swa = None, is_hybrid
    batch.reqs = batch.reqs[:3]
    keep = [batch.reqs[p] for p in state.retention_order(batch.reqs, range(3))]
    for request in keep[:num_streaming]:  # its session keeps its KV
        request.session = SimpleNamespace(streaming=True)
    released: list[Any] = []

    def room_tokens() -> int:
        return free_tokens + 400 * sum(request is not chunked for request in released)

    def release(request: Any, *args: Any, **kw: Any) -> None:
        released.append(request)

    scheduler.token_to_kv_pool_allocator.available_size = room_tokens
    batch.check_decode_mem = lambda: room_tokens() >= len(batch.reqs)
    batch.release_req = lambda index, *args, **kw: release(batch.reqs[index])
    batch._get_decode_retraction_order = lambda reqs: state.retention_order(reqs, range(len(reqs)))
    monkeypatch.setattr(kv_copy, "release_kv_cache", release)
    seen: list[Any] = []
    server.take_pass(lambda batch: seen.append([*batch.reqs]))
    gone = [*keep[num_left:][::-1], *([] if goes_on else [chunked])]
    assert seen == [[request for request in batch.reqs if request in keep[:num_left]]]
    assert len(batch.reqs) == num_left
    assert released == server.waiting[2:] == gone
    assert (scheduler.chunked_req is chunked) == goes_on


@pytest.mark.parametrize("runs_any", [True, False])
def test_others_pass_a_swapped_request_without_room_only_if_nothing_runs(
    roomy: FullServer, monkeypatch: pytest.MonkeyPatch, runs_any: bool
) -> None:
    roomy.batch.reqs = roomy.batch.reqs[:runs_any]
    roomy.scheduler.get_num_allocatable_reqs = lambda num_running, running_batch: 10
    roomy.set_free(10**6)
    first, *others = roomy.waiting
    first.output_ids, first.kv.retraction_backup = array("q", [1]), object()
    asked: list[Any] = []

    def no_room(self: Preemption, running_batch: Any, reqs: Any) -> Any:
        asked.extend(reqs)
        return running_batch, [*reqs]

    monkeypatch.setattr(Preemption, "resume", no_room)
    seen: list[Any] = []
    roomy.take_pass(lambda batch: seen.extend(roomy.waiting))
    assert asked == [first]
    assert seen == ([] if runs_any else others)
    assert same(roomy.waiting, [first, *others])


def test_a_request_that_joins_after_the_plan_waits_for_the_next(roomy: FullServer) -> None:
    (late,), before = roomy.newcomers, [*roomy.waiting]

    def calc_priority() -> None:
        roomy.hooks["calc_priority"](None, roomy.waiting)

    def original(batch: Any) -> None:
        roomy.waiting.append(late)  # its grammar is ready
        calc_priority()
        assert late not in roomy.waiting

    assert same(roomy.take_pass(original), [*before, late])
    calc_priority()  # outside a pass nothing is hidden
    assert late in roomy.waiting
