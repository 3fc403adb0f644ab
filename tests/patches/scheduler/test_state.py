from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from patches.carrier import encode, encode_hints
from patches.messages import StepTimes
from patches.scheduler.jobs import Jobs
from patches.scheduler.state import SchedulerState
from patches.scheduler.view import is_short
from sage_sched.app.config import PreemptionConfig, SageConfig, StepTimeConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from sage_sched.plan import Plan, Preempt, PreemptionMode
from sage_sched.policies.sage import Sage
from sage_sched.slo import SloClass, SloConfig
from tests.checks.full_server import stand_in_batch, stand_in_scheduler


def request(
    lengths: list[int] | None,
    custom_params: dict[str, Any] | None = None,
    prompt: Sequence[int] = (1,) * 20,
) -> Any:
    """What we read of sglang.srt.managers.schedule_batch.Req."""
    carried = encode(LengthDistribution.from_samples(lengths, "history")) if lengths else {}
    return SimpleNamespace(
        origin_input_ids=array("q", prompt),
        output_ids=array("q"),
        extra_key=None,
        input_embeds=None,
        cache_salt=None,
        _compute_max_prefix_len=lambda num_tokens: num_tokens - 1,
        session=None,
        cached_tokens=0,
        kv=SimpleNamespace(retraction_backup=None, kv_allocated_len=len(prompt)),
        sampling_params=SimpleNamespace(
            max_new_tokens=1000,
            ignore_eos=False,
            custom_params={**carried, **(custom_params or {})},
        ),
    )


@pytest.fixture
def state() -> SchedulerState:
    return made()


def made() -> SchedulerState:
    config = SageConfig(preemption=PreemptionConfig(enabled=False))
    return SchedulerState(stand_in_scheduler(lambda: 10_000), config)


def arrive(state: SchedulerState, *requests: Any) -> list[Any]:
    for req in requests:
        state.jobs.arrived(req)
    return list(requests)


def ordered(state: SchedulerState, queue: Sequence[Any]) -> list[Any]:
    """The queue by the plan of a pass."""
    state._scheduler.waiting_queue = list(queue)
    plan = state.plan(state._scheduler.running_batch)
    assert plan.order is not None
    return [queue[position] for position in plan.order]


def fail(self: Sage, *args: object) -> float:
    raise ZeroDivisionError("a bug")


def test_the_shortest_predicted_goes_first(state: SchedulerState) -> None:
    long_one, short_one = arrive(state, request([900] * 9), request([10] * 9))
    assert ordered(state, [long_one, short_one]) == [short_one, long_one]


def test_where_prompts_alone_are_computed_the_shortest_goes_first(state: SchedulerState) -> None:
    prefills = Jobs(state.policy, state.limits, state.failures, "prefill")
    long_prompt, short_prompt = request([10] * 9, prompt=(1,) * 900), request([900] * 9)
    for req in (long_prompt, short_prompt):
        prefills.arrived(req)
    assert ordered(state, [long_prompt, short_prompt]) == [short_prompt, long_prompt]


def test_where_answers_alone_are_computed_prompts_cost_no_prefill(state: SchedulerState) -> None:
    decodes = Jobs(state.policy, state.limits, state.failures, "decode")
    one = request([10] * 9, prompt=(1,) * 900)
    one.cached_tokens = 800  # of the prefill server's tree
    decodes.arrived(one)
    job = one.sage.job
    assert job.cached_input_tokens == job.input_tokens == 900
    decodes.running([one])
    assert job.held_tokens == one.kv.kv_allocated_len
    assert job.cached_input_tokens == 900


def test_what_cannot_be_ranked_keeps_its_place(state: SchedulerState) -> None:
    unknown = request(None)
    malformed = request([5], {"__sage_weights": "x"})
    long_one, short_one = request([900] * 9), request([10] * 9)
    queue = arrive(state, unknown, long_one, malformed, short_one)
    assert ordered(state, queue) == [unknown, short_one, malformed, long_one]
    assert state.stats()["num_unranked"] == 2
    assert state.stats()["num_malformed"] == 1


def test_hints_come_with_and_without_a_prediction(state: SchedulerState) -> None:
    hints = Hints(weight=2.0, ttft_slo_ms=300.0, session="a")
    known, unknown, malformed = arrive(
        state,
        request([9] * 9, encode_hints(hints)),
        request(None, encode_hints(hints)),
        request([9] * 9, {"__sage_hint_weight": -1.0}),
    )
    assert known.sage.job.hints == unknown.sage.job.hints == hints
    assert malformed.sage.job.hints == Hints()
    assert malformed.sage.job.is_ranked
    assert state.stats()["num_malformed"] == 1


def test_the_order_does_not_depend_on_how_the_queue_was_ordered_before(
    state: SchedulerState,
) -> None:
    # A queue that one rank alone has reordered must not make it decide otherwise than the others.
    requests = arrive(
        state, *(request([10 * i] * 9) if i % 3 else request(None) for i in range(12, 0, -1))
    )
    assert ordered(state, requests) == ordered(state, requests[5:] + requests[:5])


def test_a_failing_policy_means_order_of_arrival_and_one_log_line(
    state: SchedulerState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long_one, short_one = arrive(state, request([900] * 9), request([10] * 9))
    queue = [long_one, short_one]
    assert ordered(state, queue) == [short_one, long_one]

    monkeypatch.setattr(Sage, "key", fail)
    long_one.output_ids = short_one.output_ids = array("q", [1])  # retracted, so ranked anew
    for _ in range(3):
        assert ordered(state, queue[::-1]) == [long_one, short_one]
    assert state.stats()["num_policy_errors"] == 3
    assert len(caplog.records) == 1

    monkeypatch.setattr(Sage, "on_arrival", fail)
    newcomer = request([10])
    state.jobs.arrived(newcomer)
    assert not newcomer.sage.job.is_ranked

    monkeypatch.undo()
    assert ordered(state, queue) == [short_one, long_one]


def test_two_ranks_that_see_the_same_decide_alike() -> None:
    orders = []
    for rank in (made(), made()):
        queue = []
        for i in range(200):
            req = request([1 + i * 37 % 700, 1 + i * 53 % 300])
            req.name = i
            rank.jobs.arrived(req)
            rank.jobs.served_tokens += i * 11 % 97
            queue.append(req)
        orders.append([req.name for req in ordered(rank, queue)])
    assert orders[0] == orders[1]


def test_a_retracted_request_counts_with_its_age(state: SchedulerState) -> None:
    retracted, fresh = arrive(state, request([400, 2000] * 20), request([500] * 40))
    assert ordered(state, [retracted, fresh]) == [fresh, retracted]
    ordered(state, [fresh])  # it runs meanwhile
    retracted.output_ids = array("q", [1] * 450)
    assert ordered(state, [retracted, fresh]) == [fresh, retracted]
    assert retracted.sage.job.generated_tokens == 450


def test_an_answer_that_would_be_begun_anew_is_retracted_last(state: SchedulerState) -> None:
    short, long, of_embeddings = arrive(state, *(request([n] * 9) for n in (10, 300, 900)))
    of_embeddings.input_embeds = [[0.0]]
    assert state.retention_order([short, long, of_embeddings], [0, 1, 2]) == [2, 0, 1]


def test_a_failing_policy_leaves_retraction_to_sglang(
    state: SchedulerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = arrive(state, request([900] * 9), request([10] * 9))
    assert state.retention_order(running, [0, 1]) == [1, 0]
    for req in running:
        req.output_ids = array("q", [1])
    monkeypatch.setattr(Sage, "key", fail)
    assert state.retention_order(running, [0, 1]) == [0, 1]
    assert state.stats()["num_policy_errors"] == 1


def test_step_times_that_are_told_rank_all_anew(
    state: SchedulerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_prefill = replace(StepTimeConfig().step_time(), prefill_token_s=1.0)
    long_prompt, long_answer = request([10] * 9), request([900] * 9)
    long_prompt.origin_input_ids = array("q", [1] * 200)
    queue = arrive(state, long_prompt, long_answer)
    assert ordered(state, queue) == [long_prompt, long_answer]
    state.told(StepTimes(seconds=[*astuple(slow_prefill)], source="learned"))
    assert state.view(state._scheduler.running_batch).server.step_time == slow_prefill
    assert state.stats()["step_time"]["prefill_token_ms"] == 1000.0
    assert ordered(state, queue) == [long_answer, long_prompt]

    monkeypatch.setattr(Sage, "on_server", fail)
    state.told(StepTimes(seconds=[*astuple(slow_prefill)], source="learned"))
    assert state.stats()["num_policy_errors"] == 1
    assert ordered(state, queue) == [long_answer, long_prompt]


def test_a_tick_dates_those_that_came_with_it(state: SchedulerState) -> None:
    state.jobs._policy.uses_clock = True  # type: ignore[misc]
    (early,) = arrive(state, request([9]))
    state.jobs.ticked(5.0)
    (late,) = arrive(state, request([9]))
    state.jobs.ticked(7.5)
    assert (early.sage.job.arrival_s, late.sage.job.arrival_s) == (5.0, 7.5)
    view = state.view(state._scheduler.running_batch)
    assert view.now_s == 7.5


def test_drafts_accepted_after_the_end_of_a_request_are_no_work_for_it(
    state: SchedulerState,
) -> None:
    ends, goes_on = arrive(state, request([10] * 9), request([10] * 9))
    step = stand_in_batch(reqs=[ends, goes_on])
    step.forward_mode = SimpleNamespace(is_extend_without_speculative=lambda: False)
    for served_tokens in (2, 2):
        state.jobs.accepted(step, np.array([3, 2]))
        assert ends.sage.job.served_tokens == served_tokens
        state.jobs.gone(ends)
    assert state.jobs.served_tokens == 2 + 1 + 1


def test_what_the_radix_tree_has_of_a_prompt_costs_nothing(state: SchedulerState) -> None:
    document = range(10, 5000)
    cached = request([30], prompt=[*document, 1, 2, 3])
    shorter = request([30], prompt=range(6000, 8000))
    queue = arrive(state, shorter, cached)
    assert ordered(state, queue) == [shorter, cached]
    state._scheduler.tree_cache.insert(InsertParams(key=RadixKey(array("q", document))))
    assert ordered(state, queue) == [cached, shorter]
    assert cached.sage.job.cached_tokens == len(document)
    state._scheduler.tree_cache.reset()
    assert ordered(state, queue) == [shorter, cached]


def test_memory_runs_out_beside_a_last_token_unless_that_is_on_its_way(
    state: SchedulerState,
) -> None:
    scheduler = state._scheduler
    ending, other = arrive(state, request([9]), request([9]))
    ending.next_output_finishes_by_length = lambda: True
    other.next_output_finishes_by_length = lambda: False
    ending.finished = other.finished = lambda: False
    batch = stand_in_batch([ending, other])
    scheduler.token_to_kv_pool_allocator.available_size = lambda: 1
    # Nothing is in flight: without overlap, or as a prefill was launched last.
    assert is_short(scheduler, batch)
    assert state.view(batch).is_short
    scheduler._reqs_finishing_inflight = lambda batch: [ending]
    assert not is_short(scheduler, batch)
    assert not state.view(batch).is_short


def test_what_came_as_memory_ran_out_is_given_its_place_by_the_next_plan(
    state: SchedulerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_one, short_one = queue = arrive(state, request([900] * 9), request([10] * 9))
    yields = Plan((), (Preempt(long_one.sage.job, PreemptionMode.SWAP, "memory runs out"),))
    monkeypatch.setattr("patches.scheduler.state.decide", lambda *args: yields)
    ordered(state, queue)
    assert long_one.sage.waits.num_before is short_one.sage.waits.num_before is None
    monkeypatch.undo()
    ordered(state, queue)
    assert (long_one.sage.waits.num_before, short_one.sage.waits.num_before) == (1, 0)


@pytest.mark.parametrize(
    ("tpot_slo_ms", "mixes", "warns"),
    [(100.0, False, True), (100.0, True, False), (math.inf, False, False)],
)
def test_it_warns_of_a_tpot_that_prefills_hold_up(
    tpot_slo_ms: float, mixes: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = stand_in_scheduler(lambda: 10_000)
    scheduler.is_mixed_chunk = mixes
    slo = SloConfig(classes={"interactive": SloClass(tpot_slo_ms=tpot_slo_ms)})
    SchedulerState(scheduler, SageConfig(slo=slo, preemption=PreemptionConfig(enabled=False)))
    assert ("--enable-mixed-chunk" in caplog.text) == warns
