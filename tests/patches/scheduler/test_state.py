from __future__ import annotations

from array import array
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from patches.messages import StepTimes
from patches.scheduler.view import is_short
from sage_sched.app.config import StepTimeConfig
from sage_sched.job import Hints
from sage_sched.plan import Plan, Preempt, PreemptionMode
from sage_sched.policies.sage import Sage
from tests.patches.schedulers import Server, StandInBatch, make_request

LONG, SHORT = [900] * 9, [10] * 9


def fail(*args: object) -> Any:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(("mode", "first"), [("null", 1), ("prefill", 0)])
def test_short_requests_go_first_on_a_prefill_server_by_prompts(mode: str, first: int) -> None:
    server = Server(disaggregation_mode=mode)
    reqs = server.queue(make_request(LONG), make_request(SHORT, 25))
    assert server.ordered() == [reqs[first], reqs[1 - first]]


@pytest.mark.parametrize(
    ("mode", "cached_tokens", "held_tokens"), [("null", 800, 0), ("decode", 900, 700)]
)
def test_a_decode_server_pays_no_prefill(mode: str, cached_tokens: int, held_tokens: int) -> None:
    server = Server(disaggregation_mode=mode)
    (req,) = server.arrive(make_request(SHORT, 900))
    # Others share 800 tokens. On a decode server it means the prefill server's tree.
    req.cached_tokens, req.kv.kv_allocated_len = 800, 700
    (job,) = server.state.jobs.running([req])
    assert (job.cached_input_tokens, job.held_tokens) == (cached_tokens, held_tokens)


def test_unranked_requests_keep_their_places(server: Server) -> None:
    hints = Hints(weight=2.0, session="a")
    no_lengths = make_request([5], carried={"__sage_weights": "x"}, hints=hints)
    no_hints = make_request(LONG, carried={"__sage_hint_weight": -1.0})
    unknown, short_one = make_request(), make_request(SHORT, hints=hints)
    reqs = server.queue(unknown, no_hints, no_lengths, short_one)
    assert server.ordered() == [unknown, short_one, no_lengths, no_hints]
    assert [req.sage.job.hints for req in reqs] == [Hints(), Hints(), hints, hints]
    found = server.stats()
    assert (found["num_ranked"], found["num_unranked"], found["num_malformed"]) == (
        {"history": 2}, 2, 2
    )  # fmt: skip


def test_a_job_has_what_its_request_says(server: Server) -> None:
    req = make_request([9] * 9, 30, max_new_tokens=0, ignore_eos=True)
    req.session = object()
    server.arrive(make_request(), req)
    job = req.sage.job
    assert (job.arrival, job.input_tokens, job.max_new_tokens) == (1, 30, 1)
    assert job.has_fixed_length
    assert job.keeps_memory


def test_tokens_count_as_they_are_computed(server: Server) -> None:
    _, retracted, decoding = reqs = server.arrive(*(make_request([9], 30) for _ in range(3)))
    for req in (retracted, decoding):
        req.output_ids.append(1)
    batch = StandInBatch(reqs, prefills=True)
    batch.decoding_reqs, batch.extend_lens, batch.extend_num_tokens = [decoding], [30, 31, 1], 62
    server.state.listeners.ran(batch)
    server.step(*reqs)
    assert [req.sage.job.served_tokens for req in reqs] == [31, 32, 2]
    assert (server.stats()["served_tokens"], server.stats()["recomputed_tokens"]) == (65, 31)


def test_if_the_policy_fails_plans_are_first_come_first_served(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long_one, short_one = queue = server.queue(make_request(LONG), make_request(SHORT))
    assert server.ordered() == [short_one, long_one]
    assert server.state.retention_order(queue, [0, 1]) == [1, 0]
    for name in ("key", "on_arrival", "on_server", "on_end"):
        monkeypatch.setattr(Sage, name, fail)
    for req in queue:
        req.output_ids = array("q", [1])  # retracted, so ranked anew
    for _ in range(3):
        assert server.ordered(queue[::-1]) == [long_one, short_one]
    assert server.state.retention_order(queue, [0, 1]) == [0, 1]
    assert server.stats()["num_policy_errors"] == 4
    assert len(caplog.records) == 1
    (newcomer,) = server.arrive(make_request([10]))
    assert not newcomer.sage.job.is_ranked
    server.state.updated(StepTimes(seconds=[1.0] * 7, source="learned"))
    server.state.end(newcomer, was_aborted=False)
    assert server.stats()["num_policy_errors"] == 7
    monkeypatch.undo()
    assert server.ordered(queue) == [short_one, long_one]


def test_a_retracted_request_counts_with_its_age(server: Server) -> None:
    retracted, fresh = server.arrive(make_request([400, 2000] * 20), make_request([500] * 40))
    assert server.ordered([retracted, fresh]) == [fresh, retracted]
    server.ordered([fresh])  # it runs meanwhile
    retracted.output_ids = array("q", [1] * 450)
    assert server.ordered([retracted, fresh]) == [fresh, retracted]
    assert retracted.sage.job.generated_tokens == 450
    assert [*server.state.waiting.begun] == [retracted]
    server.ordered([fresh])
    assert not server.state.waiting.begun


def test_an_answer_that_would_begin_anew_is_retracted_last(server: Server) -> None:
    reqs = server.arrive(*(make_request([n] * 9) for n in (10, 300, 900)))
    reqs[2].input_embeds = [[0.0]]
    assert server.state.retention_order(reqs, [0, 1, 2]) == [2, 0, 1]


def test_new_step_times_rank_all_anew(server: Server) -> None:
    slow_prefill = replace(StepTimeConfig().step_time(), prefill_token_s=1.0)
    long_prompt, long_answer = server.queue(make_request(SHORT, 200), make_request(LONG))
    assert server.ordered() == [long_prompt, long_answer]
    server.state.updated(StepTimes(seconds=[*astuple(slow_prefill)], source="learned"))
    assert server.stats()["step_time"]["prefill_token_ms"] == 1000.0
    assert server.ordered() == [long_answer, long_prompt]


def test_a_tick_dates_the_requests_that_came_with_it() -> None:
    server = Server(schedule_policy="proserve")
    (early,) = server.arrive(make_request([9]))
    server.state.jobs.ticked(5.0)
    (late,) = server.arrive(make_request([9]))
    server.state.jobs.ticked(7.5)
    assert (early.sage.job.arrival_s, late.sage.job.arrival_s) == (5.0, 7.5)
    assert server.state.view(server.scheduler.running_batch).now_s == 7.5


def test_drafts_after_the_end_of_a_request_are_no_work_for_it(server: Server) -> None:
    ends, goes_on = server.arrive(make_request(SHORT), make_request(SHORT))
    batch = StandInBatch([ends, goes_on])
    result = SimpleNamespace(accept_lens=torch.tensor([3, 2]))
    for _ in range(2):  # under overlap it is in one more step
        server.state.stepped(batch, result)
        ends.finished_reason = "stop"
        server.state.end_finished([ends])
    assert ends.sage.job.served_tokens == 2
    assert server.stats()["served_tokens"] == 2 + 1 + 1


def test_cached_prompts_cost_nothing(server: Server) -> None:
    document, tree = range(10, 5000), server.scheduler.tree_cache
    shorter, cached = server.queue(
        make_request([30], range(6000, 8000)), make_request([30], [*document, 1, 2, 3])
    )
    assert server.ordered() == [shorter, cached]
    tree.insert(InsertParams(key=RadixKey(array("q", document))))
    assert server.ordered() == [cached, shorter]
    assert cached.sage.job.cached_tokens == len(document)
    tree.reset()
    assert server.ordered() == [cached, shorter][::-1]


def test_memory_is_not_short_if_a_last_token_is_on_its_way(server: Server) -> None:
    ending, other = server.arrive(make_request([9]), make_request([9]))
    batch, scheduler = StandInBatch([ending, other]), server.scheduler
    scheduler.token_to_kv_pool_allocator.available_size = lambda: 1
    for in_flight, expected in (([], True), ([ending], False)):
        scheduler._reqs_finishing_inflight = lambda batch, found=in_flight: found
        assert is_short(scheduler, batch) is server.state.view(batch).is_short is expected


def test_no_order_gives_no_places(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    long_one, short_one = queue = server.queue(make_request(LONG), make_request(SHORT))
    yields = Plan((), (Preempt(long_one.sage.job, PreemptionMode.SWAP, "memory runs out"),))
    with monkeypatch.context() as patch:
        patch.setattr("patches.scheduler.state.decide", lambda *args: yields)
        server.ordered()
    assert {req.sage.waits.num_before for req in queue} == {None}
    server.ordered()
    server.ordered([*queue, *server.arrive(make_request([1] * 9))])  # the first place counts
    assert (long_one.sage.waits.num_before, short_one.sage.waits.num_before) == (1, 0)
