from __future__ import annotations

import gc
import time
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq

from patches.scheduler import kv_copy
from patches.scheduler.hidden import timed_out, without_started
from patches.scheduler.preemption import Preemption
from patches.scheduler.request import Waits
from sage_sched.limits import Limits
from sage_sched.plan import Budget, NextPlan
from sage_sched.policies.sage import Sage
from sage_sched.view import SchedulerView
from tests.checks.host import FullServer


@pytest.fixture
def full() -> FullServer:
    return FullServer(num_waiting=5, num_newcomers=1)


@pytest.fixture
def roomy() -> FullServer:
    server = FullServer(num_waiting=4, num_newcomers=1)
    server.batch.batch_is_full = False
    return server


def test_nothing_of_a_view_outlives_its_pass(full: FullServer) -> None:
    # It would keep requests alive, and their KV in host memory.
    for request in full.batch.reqs:
        request.output_ids.extend([0] * 1500)  # so that the policy weighs which to preempt
    full.next_arrival()
    full.take_pass()
    ours = {request.sage.job for request in full.batch.reqs}
    gc.collect()
    views = [found for found in gc.get_objects() if type(found) is SchedulerView]
    assert not [view for view in views if ours & {*view.running}]


def test_an_empty_queue_needs_no_plan_while_memory_suffices(
    full: FullServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preemption, "preempt", lambda *args: [])
    full.take_pass()
    full.scheduler.waiting_queue = []
    for free_tokens, num_passes in ((10**6, 1), (0, 2)):
        full.set_free(free_tokens)
        full.take_pass()
        assert full.stats()["num_passes"] == num_passes
        assert full.state.jobs.waiting == []  # it keeps no request alive


def with_slots() -> FullServer:
    full = FullServer(4, 1, "fcfs-fill", num_running=64)
    full.scheduler.get_num_allocatable_reqs = lambda num_running, running_batch: 9
    return full


def passes(full: FullServer, original: Any = None) -> int:
    """Take a pass after an end; return how many plans were made so far."""
    full.batch.batch_is_full = False
    full.take_pass(original)
    number: int = full.stats()["num_passes"]
    return number


def test_the_batch_is_full_while_the_first_request_lacks_memory() -> None:
    full = with_slots()
    assert [passes(full), passes(full)] == [1, 1]
    assert full.batch.batch_is_full
    full.set_free(10**6)
    assert passes(full) == 2


def test_requests_that_sglang_leaves_in_the_queue_do_not_wait_for_anothers_memory() -> None:
    """The first of them has memory, and the last lacks it."""
    full = with_slots()
    full.set_free(full.scheduler.token_to_kv_pool_allocator.available_size() + 1_500)
    assert [passes(full), passes(full)] == [1, 2]


def test_a_request_that_has_room_after_all_no_longer_lacks_memory() -> None:
    """It shares a cached prefix with a request that has just locked it, for example."""
    full = with_slots()
    assert passes(full, lambda batch: full.waiting.pop(0)) == 1
    assert len(full.waiting) == 3
    assert passes(full) == 2


def test_a_plan_that_is_due_finds_the_batch_open_after_an_end() -> None:
    """The first request lacks memory, but another that goes before it may have come."""
    full = with_slots()
    passes(full)
    full.state.core.last_plan.next = NextPlan(at_s=-1.0)
    seen: list[bool] = []
    assert passes(full, lambda batch: seen.append(batch.batch_is_full)) == 2
    assert seen == [False]


def test_a_request_whose_grammar_was_compiled_after_the_plan_is_planned() -> None:
    full = with_slots()
    passes(full)
    (late,) = full.newcomers
    full.hooks["_add_request_to_queue"](
        lambda scheduler, req: full.waiting.append(req), full.scheduler, late
    )
    assert passes(full) == 2


def test_ended_requests_are_in_no_plan(full: FullServer) -> None:
    # They are in a decode server's running batch until after the pass.
    gone, *others = full.batch.reqs
    full.state.end(gone, was_aborted=False)
    full.batch.filter_batch = lambda: setattr(full.batch, "reqs", others)
    for is_full in (False, True):  # no request has ended in the second pass
        full.batch.batch_is_full = True
        full.take_pass()
        assert (full.batch.reqs, full.batch.batch_is_full) == (others, is_full)


@pytest.mark.parametrize(
    ("is_idle", "swapped", "queued"),
    [(True, [], [1, 2, 3, 4]), (False, [], [0, 1, 2, 3, 4]), (True, [1, 2], [0, 3, 4])],
)
def test_the_limit_counts_neither_swapped_requests_nor_the_first_on_an_idle_server(
    full: FullServer, is_idle: bool, swapped: list[int], queued: list[int]
) -> None:
    before = [*full.waiting]
    for number in swapped:
        before[number].kv.retraction_backup = object()
    full.scheduler.is_fully_idle = lambda ignore_waiting: is_idle and ignore_waiting
    seen = without_started(full.scheduler, lambda: [*full.waiting])
    assert seen == [before[number] for number in queued]
    assert full.waiting == before
    # SGLang drops one of the requests that it sees, for a higher priority.
    dropped = without_started(full.scheduler, lambda: full.waiting.pop(1))
    assert dropped is seen[1]
    assert full.waiting == [request for request in before if request is not dropped]


def test_a_timeout_is_the_reason_for_which_a_request_ends(
    full: FullServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "1000")
    waits, preempted, late, in_time = *full.waiting[:2], *full.batch.reqs[:2]
    waits.rid, preempted.rid = "waits", "preempted"
    preempted.sage.job.num_preemptions = 1
    for req, rid, came_s in ((late, "late", -2000.0), (in_time, "in time", 0.0)):
        req.rid, req.sage.waits = rid, Waits(time.monotonic() + came_s)
    reqs = (waits, late, in_time, preempted)
    aborts = [AbortReq(rid=req.rid, abort_message="late") for req in reqs]
    assert timed_out(full.scheduler, lambda: aborts) == aborts[:2]
    assert [req.sage.refusal for req in reqs] == ["late", "late", "", ""]


@pytest.mark.parametrize(
    ("budget", "attributes", "prefill_tokens", "chunk_tokens"),
    [
        (Budget(prefill_tokens=100, chunk_tokens=50), {"page_size": 16}, 96, 48),
        # Each of 256 decoding requests takes a row.
        (Budget(50, 30), {"page_size": 16, "truncation_align_size": 24, "is_mixed_chunk": True},
         48 + 256, 48),
        (None, {}, 16384, None),
    ],
)  # fmt: skip
def test_a_pass_keeps_to_its_budget_in_whole_units(
    roomy: FullServer, monkeypatch: pytest.MonkeyPatch, budget: Budget | None,
    attributes: dict[str, Any], prefill_tokens: int, chunk_tokens: int | None,
) -> None:  # fmt: skip
    scheduler, limit = roomy.scheduler, roomy.hooks["shortest_prefill_chunk_limit"]
    vars(scheduler).update(attributes)
    roomy.state.core.limits = Limits()  # no gap bound
    monkeypatch.setattr(Sage, "budget", lambda self, view, queue: budget)
    seen: list[Any] = []

    def note(batch: Any = None) -> None:
        limits = [limit(lambda theirs=theirs: theirs) for theirs in (None, 5, 9999)]
        seen.append([scheduler.max_prefill_tokens, scheduler.chunked_prefill_size, *limits])

    roomy.take_pass(note)
    note()
    assert seen == [
        [prefill_tokens, min(prefill_tokens, 8192), chunk_tokens, 5, chunk_tokens or 9999],
        [16384, 8192, None, 5, 9999],
    ]


@pytest.mark.parametrize("has_room", [True, False])
def test_a_chunk_goes_on_without_room_and_if_ranks_wait_for_each_other(
    roomy: FullServer, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sage, "budget", lambda self, view, queue: Budget(prefill_tokens=0))
    roomy.scheduler.chunked_req = roomy.waiting.pop()
    roomy.batch.check_decode_mem = lambda: has_room
    roomy.scheduler.prefill_delayer = object() if has_room else None
    went_on: list[Any] = []
    roomy.set_free(10**6)
    roomy.take_pass(went_on.append)
    assert went_on == [roomy.batch]


@pytest.mark.parametrize(
    ("free_tokens", "num_streaming", "is_hybrid", "mode", "num_left", "goes_on"),
    [
        (1003, 0, False, "null", 3, True),
        (1002, 0, False, "null", 2, True),
        (400, 0, False, "null", 1, True),
        (100, 0, False, "null", 0, True),
        (100, 2, False, "null", 2, False),
        (100, 2, False, "prefill", 2, True),
        (3, 0, True, "null", 3, True),  # there SGLang lets a chunk wait
        (2, 0, True, "null", 2, True),
    ],
)
def test_the_last_of_the_order_leave_before_a_chunk_without_room(
    monkeypatch: pytest.MonkeyPatch, free_tokens: int, num_streaming: int, is_hybrid: bool,
    mode: str, num_left: int, goes_on: bool,
) -> None:  # fmt: skip
    server = FullServer(num_waiting=3, num_newcomers=0)
    scheduler, batch, state = server.scheduler, server.batch, server.state
    chunked = scheduler.chunked_req = server.waiting.pop()
    # With the answer that it had before it was retracted, 1000 tokens are left.
    chunked.origin_input_ids, chunked.prefix_len = array("q", [0]) * 1190, 200
    chunked.output_ids = array("q", [0]) * 10
    state.preemption, scheduler.is_hybrid_swa = None, is_hybrid
    scheduler.server_args.disaggregation_mode = mode
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
    assert batch.batch_is_full == (not gone)


@pytest.mark.parametrize("runs_any", [True, False])
def test_others_pass_a_swapped_request_without_room_only_if_nothing_runs(
    roomy: FullServer, monkeypatch: pytest.MonkeyPatch, runs_any: bool
) -> None:
    roomy.batch.reqs = roomy.batch.reqs[:runs_any]
    roomy.scheduler.get_num_allocatable_reqs = lambda num_running, running_batch: 10
    roomy.set_free(10**6)
    first, *others = roomy.waiting
    first.output_ids, first.kv.retraction_backup = array("q", [1]), object()
    seen: list[Any] = []

    def no_room(self: Preemption, running_batch: Any, reqs: Any) -> Any:
        seen.append([*reqs])
        return [*reqs]

    monkeypatch.setattr(Preemption, "resume", no_room)
    roomy.take_pass(lambda batch: seen.append([*roomy.waiting]))
    assert seen == [[first], [] if runs_any else others]
    assert {*roomy.waiting} == {first, *others}


def test_a_request_that_joins_after_the_plan_waits_for_the_next(roomy: FullServer) -> None:
    (late,), queue = roomy.newcomers, [*roomy.waiting]
    calc_priority = roomy.hooks["calc_priority"]

    def original(batch: Any) -> None:
        roomy.waiting.append(late)  # its grammar is ready
        calc_priority(None, roomy.waiting)
        assert late not in roomy.waiting

    for during in (original, None):
        assert sorted(map(id, roomy.take_pass(during))) == sorted(map(id, [*queue, late]))
    calc_priority(None, roomy.waiting)  # nothing is hidden outside a pass
    assert late in roomy.waiting
