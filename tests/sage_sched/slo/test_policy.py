"""ProServe's decisions on cases that can be checked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sage_sched.job import NO_HINTS, Hints, Job
from sage_sched.order import serving_order
from sage_sched.slo import Proserve, ProserveParameters
from sage_sched.steps import StepTime
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import IDLE, SERVER, decide, known, waiting

# A prefilled token takes 1 ms, a step 40 ms more, and each token of KV 1 us.
STEP_TIME = StepTime(0.04, 0.0, 0.001, 0.0, 0.04, 0.0, 1e-6)
UNMIXED = replace(SERVER, step_time=STEP_TIME)
MIXED = replace(UNMIXED, mixes_steps=True)
SOON = Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0)
HIGH = replace(SOON, weight=10.0, slo_class="high")


def within(seconds: float, hints: Hints = SOON) -> Hints:
    return replace(hints, ttft_slo_ms=1000 * seconds)


def job(
    arrival: int,
    hints: Hints = SOON,
    input_tokens: int = 100,
    age: int = 0,
    arrival_s: float = 0.0,
    lengths: tuple[int, ...] = (200,),
) -> Job:
    return Job(
        arrival, input_tokens, 4096, known(*lengths), 0, arrival_s=arrival_s, hints=hints,
        generated_tokens=age, served_tokens=age,
    )  # fmt: skip


def policy(*jobs: Job, mixed: bool = True, **parameters: object) -> Proserve:
    server = MIXED if mixed else UNMIXED
    ours = Proserve(ProserveParameters(**parameters), server)  # type: ignore[arg-type]
    for one in jobs:
        assert ours.on_arrival(one)
    return ours


def order(ours: Proserve, view: SchedulerView, **facts: object) -> list[int]:
    view = replace(view, **facts)  # type: ignore[arg-type]
    ours.on_pass(view)
    return serving_order(ours, view)


@pytest.mark.parametrize(
    ("jobs", "now_s", "parameters", "expected"),
    [
        # Three prompts of 2.6 s together, all due within 1: by density, and weight counts.
        ([job(0, input_tokens=900), job(1, input_tokens=800), job(2, HIGH, input_tokens=900)],
         0.0, {}, [2, 1, 0]),
        # Those that have time go by deadline.
        ([job(0, within(60)), job(1, within(60), arrival_s=0.5), job(2, within(90, HIGH))],
         1.0, {}, [0, 1, 2]),
        # Best effort goes behind in the order of sage.
        ([job(0, NO_HINTS, lengths=(2000,)), job(1, NO_HINTS, lengths=(20,)),
          job(2, within(60), input_tokens=5000)],
         0.0, {}, [2, 1, 0]),
        # Both are a second and a half late: 25 tokens at 60 ms gained each. One can catch up.
        ([job(0, lengths=(10,)), job(1, lengths=(2000,))],
         2.5, {"density": "expected", "starved_share": 0.0}, [1, 0]),
        # The worth of answers counts before there is no time left.
        ([job(0, within(8)), job(1, within(9, HIGH))], 0.0, {}, [0, 1]),
        ([job(0, within(8)), job(1, within(9, HIGH))], 0.0, {"density": "expected"}, [1, 0]),
    ],
)  # fmt: skip
def test_who_goes_first(
    jobs: list[Job], now_s: float, parameters: dict[str, object], expected: list[int]
) -> None:
    assert order(policy(*jobs, **parameters), waiting(*jobs), now_s=now_s) == expected


def test_what_is_found_to_be_cached_in_a_pass_takes_no_job_out_of_the_order() -> None:
    jobs = [job(0, input_tokens=900), job(1, HIGH, input_tokens=900)]
    view = replace(waiting(*jobs), cached_tokens=lambda position: 200)
    assert decide(view, policy(*jobs)).order == [1, 0]


@pytest.mark.parametrize(
    ("now_s", "first_token_weight", "is_mixed", "num_tokens"),
    [
        # 300 ms are left, of which 40 and the KV are taken.
        (1.7, 1.0, True, 260),
        # Besides prefills each batch takes 40 ms, in which 40 of a prompt's 5000 tokens could be
        # prefilled. So a batch is longer if first tokens gain more than the tokens that become
        # late.
        (1.9, 10.0, True, 60),
        (1.9, 1000.0, True, 260),
        # On a server that does not mix, a decode step must fit too. Batches are not so short that
        # cuts take the time: a decode step and the fixed time of a prefill take 80 ms.
        (1.5, 1.0, False, 420),
        (1.9, 1.0, False, 400),
    ],
)
def test_a_batch_lasts_until_the_next_token_is_due(
    now_s: float, first_token_weight: float, is_mixed: bool, num_tokens: int
) -> None:
    """The running request needs its 11th token by 2 s."""
    hints = replace(SOON, first_token_weight=first_token_weight)
    running, newcomer = job(0, age=10), job(1, hints, input_tokens=5000, arrival_s=now_s)
    view = replace(waiting(newcomer), running=[running], now_s=now_s)
    ours = policy(running, newcomer, mixed=is_mixed)
    ours.on_pass(view)
    budget = ours.budget(view)
    assert budget is not None
    assert budget.prefill_tokens == pytest.approx(num_tokens, abs=2)


def test_tokens_that_are_due_next_are_decoded_first() -> None:
    running, newcomer = job(0, age=10), job(1, arrival_s=1.92)
    ours = policy(running, newcomer, eta=0.0)
    view = replace(waiting(newcomer), now_s=1.92)
    # Without running jobs a pass need not wait.
    for beside, decode_only in (([running], True), ([], False)):
        assert decide(replace(view, running=beside), ours).decode_only is decode_only


def test_a_hopeless_request_shortens_no_batch() -> None:
    hopeless = job(0, replace(SOON, ttft_slo_ms=0.001, tpot_slo_ms=0.001), age=5)
    newcomer = job(1, within(9), input_tokens=5000, arrival_s=8.0)
    view = replace(waiting(newcomer), running=[hopeless], now_s=8.0)
    ours = policy(hopeless, newcomer)
    ours.on_pass(view)
    assert ours.budget(view) is None


def starving() -> tuple[Proserve, list[Job], SchedulerView]:
    """Two starved jobs, of which the first goes first, and twenty others."""
    jobs = [job(i, arrival_s=0.1 * i) for i in range(2)]
    jobs += [job(2 + i, HIGH, arrival_s=50.0) for i in range(20)]
    ours = policy(*jobs, starved_share=0.2)
    view = replace(waiting(*jobs), now_s=50.0, served_tokens=1000)
    assert order(ours, view)[0] == 0
    return ours, jobs, view


def test_starved_requests_have_their_share_by_arrival() -> None:
    ours, jobs, view = starving()
    assert order(policy(*jobs, starved_share=0.2), view, served_tokens=0)[0] != 0
    assert order(policy(*jobs, starved_share=0.0), view)[0] != 0
    # It has had its turn, and used up more than that: the next one waits until there is more.
    jobs[0].served_tokens = 100
    assert order(ours, view, waiting=jobs[1:], served_tokens=1100)[0] != 0
    assert order(ours, view, waiting=jobs[1:], served_tokens=3000)[0] == 0


def test_a_starved_request_that_leaves_unserved_hands_its_share_on() -> None:
    ours, jobs, view = starving()
    assert order(ours, view, waiting=jobs[1:])[0] == 0
    # A job with room on a decode server has had its turn: its KV is on its way.
    ours, jobs, view = starving()
    assert order(ours, view, waiting=jobs[1:], running=jobs[:1])[0] != 0
    # One without room for its adapter keeps its turn, and no other request from it.
    ours, _, view = starving()
    assert order(ours, view, has_adapter=lambda position: position != 0)[0] == 1
    assert order(ours, view)[0] == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("density", ["next", "expected"])
def test_half_a_promise_and_odd_times_do_no_harm(density: str) -> None:
    """A promise may be of the first token or of the pace alone. Clocks may jump."""
    hints = (Hints(ttft_slo_ms=1000.0), Hints(tpot_slo_ms=50.0), SOON)
    jobs = [job(n, of, input_tokens=5000) for n, of in enumerate(hints)]
    jobs.append(job(3, arrival_s=1e6))
    ours = policy(*jobs, density=density)
    for now_s in (0.0, 0.9, 30.0, 1e9, -1e9):
        assert sorted(order(ours, waiting(*jobs), now_s=now_s)) == [0, 1, 2, 3]
    ours.on_server(replace(MIXED, step_time=replace(STEP_TIME, prefill_token_s=1.0)))
    assert math.isfinite(ours.key(jobs[0], IDLE))


def test_without_a_deadline_they_have_a_share_once_they_have_waited_long() -> None:
    jobs = [*(job(i) for i in range(3)), job(3, NO_HINTS), job(4, NO_HINTS)]
    jobs[4].served_at_arrival_tokens = 10_000
    ours, view = policy(*jobs), replace(waiting(*jobs), now_s=50.0)
    assert order(ours, view, served_tokens=10_000) == [0, 1, 2, 3, 4]
    # The server has worked through more than a KV pool since the first of them came.
    assert order(ours, view, served_tokens=10_001) == [0, 3, 1, 2, 4]
