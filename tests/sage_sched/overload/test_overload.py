"""Which requests overload protection refuses: one line a situation."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.app.registry import policy_named
from sage_sched.distribution import LengthDistribution
from sage_sched.job import BEHIND, Hints, Job
from sage_sched.overload import Overload, OverloadConfig, Refusal
from sage_sched.overload.overload import FLOOR, NUM_WITHIN
from sage_sched.policy import Policy
from sage_sched.slo.slo_state import slo_state_of
from tests.sage_sched.strategies import SERVER

CLASSES_MS = {"patient": (1e6, 1e6), "any": (math.inf, math.inf)}
SECOND_SLOS = OverloadConfig(enabled=True, max_ttft_ms=1000.0, max_tpot_ms=100.0)


class Door:
    """Takes requests of known lengths in, at a time that the test moves."""

    def __init__(self, policy: str = "sage", config: OverloadConfig = SECOND_SLOS) -> None:
        self.overload = Overload(config, CLASSES_MS)
        self.policy: Policy = policy_named(policy, {}, SERVER)
        self.now_s = 0.0
        self._num = 0

    def ask(
        self,
        *lengths: int,
        hints: Hints | None = None,
        source: str = "history",
        any_waits: bool = True,
        knows_steps: bool = True,
        input_tokens: int = 100,
    ) -> tuple[Job, Refusal | None]:
        known = LengthDistribution.from_samples(list(lengths) * 100, source) if lengths else None
        job = Job(self._num, input_tokens, 4096, known, 0, hints=hints or Hints())
        self._num += 1
        self.overload.arrived(job)
        job.is_ranked = self.policy.on_arrival(job)
        newcomer = self.overload.newcomer(job, self.policy, SERVER, self.now_s)
        refusal = self.overload.refuses(
            job, newcomer, self.now_s, any_waits=any_waits, knows_steps=knows_steps
        )
        if refusal is not None:
            self.overload.ended(job)
        return job, refusal

    def fill(self, num: int, *lengths: int, **about: Any) -> list[Job]:
        """Requests that come while none waits, and have begun."""
        jobs = [self.ask(*lengths, any_waits=False, **about)[0] for _ in range(num)]
        for job in jobs:
            job.grow(1)
        self.now_s += 1.0
        return jobs


PATIENT = Hints(ttft_slo_ms=1e6, tpot_slo_ms=1e6, slo_class="patient")
LOOSE = Hints(ttft_slo_ms=1e6, tpot_slo_ms=1e6)
LOOSER = Hints(ttft_slo_ms=1e6, tpot_slo_ms=1e6, slo_class="any")
HASTY = Hints(ttft_slo_ms=300.0)
HASTIER = Hints(ttft_slo_ms=1.0, tpot_slo_ms=1.0, slo_class="patient")


@pytest.mark.parametrize(
    ("policy", "crowd", "asks", "about", "refused"),
    [
        ("sage", (0, 500), (500,), {}, None),
        ("sage", (20, 500), (500,), {}, None),
        ("sage", (300, 500), (500,), {}, "ttlt"),
        ("sage", (300, 500), (5,), {}, None),  # goes first
        ("sage", (300, 5), (500,), {"source": "prior"}, None),  # most others are short
        ("sage", (300, 500), (500,), {"any_waits": False}, None),
        ("sage", (300, 500), (500,), {"knows_steps": False}, None),
        ("sage", (300, 500), (), {}, None),
        ("sage", (300, 500), (500,), {"hints": PATIENT}, None),
        ("sage", (300, 500), (500,), {"hints": LOOSE}, "ttlt"),  # claims loosen no limit
        ("sage", (300, 500), (500,), {"hints": LOOSER}, "ttlt"),
        ("sage", (300, 500), (500,), {"hints": HASTIER}, "ttlt"),
        ("fcfs-fill", (300, 500), (5,), {}, "ttft"),  # goes last
        ("fcfs-fill", (20, 500), (5,), {}, None),  # there is room
        ("fcfs-fill", (300, 500), (5,), {"hints": PATIENT}, None),
        ("fcfs-fill", (300, 500), (5,), {"hints": LOOSE}, "ttft"),
        ("fcfs-fill", (60, 20), (5,), {}, None),
        ("fcfs-fill", (60, 20), (5,), {"hints": HASTY}, "ttft"),
    ],
)  # fmt: skip
def test_whom_it_refuses(
    policy: str,
    crowd: tuple[int, int],
    asks: tuple[int, ...],
    about: dict[str, Any],
    refused: str | None,
) -> None:
    door = Door(policy)
    door.fill(*crowd)
    _, refusal = door.ask(*asks, **about)
    assert (None if refusal is None else refusal.metric) == refused
    assert refusal is None or refusal.predicted_s > refusal.limit_s


def test_a_crowd_that_starts_ahead_of_the_order_takes_several_prefills() -> None:
    door = Door()
    for _ in range(1000):
        door.ask(5, any_waits=False, input_tokens=1)
    refusal = door.ask(5)[1]
    assert refusal is not None
    assert refusal.metric == "ttft"


def test_idle_time_does_not_make_the_next_arrivals_few() -> None:
    def refuses(idle_s: float) -> bool:
        door = Door()
        for job in door.fill(100, 50):
            door.overload.ended(job)
        door.now_s += idle_s
        door.fill(1, 500)
        for _ in range(300):  # short ones that overtake it
            job, _ = door.ask(50, any_waits=False)
            door.overload.ended(job)
            door.now_s += 0.02
        return door.ask(500)[1] is not None

    assert refuses(0.0)
    assert refuses(1e5)


def test_it_is_off_by_default() -> None:
    door = Door(config=OverloadConfig())
    door.fill(300, 500)
    assert door.ask(500)[1] is None


def test_a_refusal_says_when_to_come_back() -> None:
    door = Door("fcfs-fill")
    door.fill(300, 500)
    refusal = door.ask(500)[1]
    assert refusal is not None
    assert refusal.predicted_s > refusal.limit_s
    assert 1.0 <= refusal.retry_after_s <= 60.0


def test_what_is_slow_by_itself_is_not_refused_for_that() -> None:
    door = Door("fcfs-fill")
    door.fill(1, 5)
    assert door.ask(5, input_tokens=9000)[1] is None


@pytest.mark.parametrize("source", ["prior", ""])
def test_while_the_predictor_is_dead_nothing_is_refused(source: str) -> None:
    door = Door()
    lengths = (500,) if source else ()
    door.fill(300, *lengths, source=source)
    assert not any(door.ask(*lengths, source=source)[1] for _ in range(200))
    assert door.ask(500)[1] is None  # one prediction is not many


def test_a_client_without_a_prediction_of_its_own_is_not_spared() -> None:
    door = Door()
    door.fill(300, 500)
    assert door.ask(500, source="prior")[1] is not None


def test_the_floor_admits_some_of_those_over_the_limit() -> None:
    door = Door()
    door.fill(300, 500)
    admitted = [door.ask(500)[1] is None for _ in range(10 * FLOOR)]
    assert sum(admitted) == 10


def test_limits_are_stricter_after_a_refusal_until_all_are_within() -> None:
    """Hysteresis: a server at its limit does not take turns between refusing and admitting."""
    door = Door("fcfs-fill")
    crowd = door.fill(300, 500)

    def limit_s() -> float:
        refusal = door.ask(5)[1]
        assert refusal is not None
        return refusal.limit_s

    first_s = limit_s()
    assert limit_s() == pytest.approx(0.9 * first_s)
    for job in crowd:
        door.overload.ended(job)
    for _ in range(NUM_WITHIN):
        door.now_s += 1.0
        job, refusal = door.ask(5)
        assert refusal is None
        door.overload.ended(job)
    door.fill(300, 500)
    assert limit_s() == pytest.approx(first_s)


def test_the_heaviest_tenant_is_refused_first() -> None:
    heavy, light = (Hints(tenant=name, shares_fairly=True) for name in ("heavy", "light"))
    door = Door()
    door.fill(300, 500, hints=heavy)
    door.fill(1, 500, hints=light)
    assert door.ask(500, hints=heavy)[1] is not None
    assert door.ask(500, hints=light)[1] is None


def test_jobs_that_end_no_longer_count() -> None:
    door = Door("fcfs-fill")
    for job in door.fill(300, 500):
        door.overload.ended(job)
    door.now_s = 60.0
    assert door.ask(5)[1] is None


def test_after_a_clock_jump_it_goes_on() -> None:
    for jump_s in (1e9, -1e9):
        door = Door()
        jobs = door.fill(300, 500)
        door.now_s += jump_s
        door.ask(500)
        for job in jobs:
            door.overload.ended(job)
        door.now_s += 1.0
        assert door.ask(500)[1] is None


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
def test_a_typical_request_is_one_as_the_latest_are(policy: str) -> None:
    door = Door(policy)
    assert door.overload.typical(door.policy, SERVER, 0.0) is None
    crowd = door.fill(300, 500)
    job, refusal = door.ask(500)
    assert refusal is not None
    newcomer = door.overload.newcomer(job, door.policy, SERVER, door.now_s)
    door.overload.ended(job)
    found = door.overload.typical(door.policy, SERVER, door.now_s)
    assert found is not None
    assert found[0].ttlt_s == pytest.approx(newcomer.ttlt_s)
    assert found[1] is not None
    assert found[1].metric == refusal.metric
    for each in crowd:
        door.overload.ended(each)
    found = door.overload.typical(door.policy, SERVER, door.now_s + 60.0)
    assert found is not None
    assert found[0].ttlt_s < newcomer.ttlt_s
    assert found[1] is None


def first_token_s(door: Door) -> float:
    job = Job(9999, 100, 4096, LengthDistribution.from_samples([500], "truth"), 0)
    door.overload.arrived(job)
    job.is_ranked = door.policy.on_arrival(job)
    found = door.overload.newcomer(job, door.policy, SERVER, door.now_s)
    door.overload.ended(job)
    return found.ttft_s


def test_requests_set_behind_delay_no_first_token_and_come_back_with_the_settings() -> None:
    door = Door(config=replace(SECOND_SLOS, action="behind"))
    door.fill(20, 500)
    alone_s = first_token_s(door)
    for _ in range(200):
        job, _ = door.ask(500, any_waits=False)
        job.level += BEHIND
    door.now_s += 1.0
    assert first_token_s(door) < 2 * alone_s
    Overload(SECOND_SLOS, CLASSES_MS).arrived(job)
    assert job.level == 0


@pytest.mark.parametrize("policy", ["sage", "proserve", "makespan"])
def test_late_requests_are_ranked_anew_behind_others(policy: str) -> None:
    door = Door(policy, replace(SECOND_SLOS, action="behind"))
    door.fill(300, 500)
    hints = Hints(ttft_slo_ms=1.0, tpot_slo_ms=1.0)
    known = LengthDistribution.from_samples([500] * 9, "history")
    for n in range(40):
        job = Job(1000 + n, 100, 4096, known, 0, hints=hints)
        door.overload.arrived(job)
        job.is_ranked = door.policy.on_arrival(job)
        about = (job, door.policy, SERVER, door.now_s)
        decision = door.overload.decide(*about, any_waits=True, knows_steps=True)
        assert decision.refusal is None
        assert job.is_ranked
        assert job.is_behind == (decision.degraded == "behind")
        if job.is_behind:
            assert slo_state_of(job) is None  # its deadlines no longer count
            return
    pytest.fail("none was late")


def test_asking_for_a_typical_request_changes_no_decision() -> None:
    asked, unasked = Door("fcfs-fill"), Door("fcfs-fill")
    for door in (asked, unasked):
        door.fill(300, 500)
    for _ in range(3 * FLOOR):
        asked.overload.typical(asked.policy, SERVER, asked.now_s)
        assert (asked.ask(500)[1] is None) == (unasked.ask(500)[1] is None)


@given(
    st.sampled_from(["sage", "fcfs-fill", "proserve"]),
    st.lists(st.integers(1, 2000), min_size=1, max_size=30),
    st.integers(1, 2000),
    st.integers(0, 1000),
)
def test_more_work_never_makes_a_wait_shorter(
    policy: str, lengths: list[int], newcomer: int, wait_s: int
) -> None:
    """Monotone in load: of all other requests, of any of them, and of arrivals. Beside the wait, an
    answer stops while others start, and of long ones fewer start in a second."""
    times = []
    for crowd in ([], lengths[:-1], lengths):
        door = Door(policy)
        for length in crowd:
            door.fill(1, length)
        door.now_s += wait_s
        job = Job(99, 100, 4096, LengthDistribution.from_samples([newcomer], "truth"), 0)
        door.overload.arrived(job)
        door.policy.on_arrival(job)
        found = door.overload.newcomer(job, door.policy, SERVER, door.now_s)
        # One pace for all: another mix of prompts makes other batches.
        found = replace(found, pace=replace(found.pace, step_s=0.05, start_s=0.01))
        times.append((found.ttft_s, found.wait_s))
    for one, more in pairwise(times):
        assert all(a <= b + 1e-9 for a, b in zip(one, more, strict=True))


def test_an_answer_takes_longer_while_long_prompts_start() -> None:
    found = []
    for input_tokens in (100, 3000):
        door = Door()
        door.fill(1, 500)
        for _ in range(20):
            (job,) = door.fill(1, 50, input_tokens=input_tokens)
            door.overload.ended(job)
        job, _ = door.ask(50)
        found.append(door.overload.newcomer(job, door.policy, SERVER, door.now_s))
    short, long = found
    assert short.ttft_s == long.ttft_s
    assert long.ttlt_s > 1.2 * short.ttlt_s


@pytest.mark.parametrize("jump_s", [0.0, 1e6])
def test_after_a_standstill_none_is_refused_at_low_load(jump_s: float) -> None:
    door = Door()
    for number in range(1200):
        if number == 600:
            door.now_s += jump_s
        job, refusal = door.ask(500 if number % 2 else 5, input_tokens=500)
        assert refusal is None
        door.overload.ended(job)
        door.now_s += 1.0


def test_jobs_are_let_go_where_nothing_is_refused() -> None:
    """On prefill and decode servers the predicted times of a newcomer are never computed."""
    overload = Overload(SECOND_SLOS)
    job = Job(0, 100, 4096, None, 0)
    held = sys.getrefcount(job)
    overload.arrived(job)
    overload.ended(job)
    assert sys.getrefcount(job) == held


@given(st.lists(st.tuples(st.integers(1, 2000), st.booleans()), min_size=1, max_size=600))
def test_jobs_that_end_leave_the_rows_of_the_others(crowd: list[tuple[int, bool]]) -> None:
    door, without = Door("fcfs-fill"), Door("fcfs-fill")
    jobs = [door.fill(1, length)[0] for length, _ in crowd]
    for job, (length, ends) in zip(jobs, crowd, strict=True):
        if ends:
            door.overload.ended(job)
        else:
            without.fill(1, length)
    found = []
    for each in (door, without):
        job = Job(999, 100, 4096, LengthDistribution.from_samples([5], "truth"), 0)
        found.append(each.overload.newcomer(job, each.policy, SERVER, each.now_s).before)
    assert found[0].steps == pytest.approx(found[1].steps)
    assert found[0].jobs == found[1].jobs
