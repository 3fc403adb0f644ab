"""The requests that overload protection refuses, a situation per line."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from sage_sched.app.config import SageConfig
from sage_sched.distribution import UNKNOWN, LengthDistribution
from sage_sched.job import BEHIND, NO_HINTS, Hints, Job
from sage_sched.overload import OverloadConfig, Refusal
from sage_sched.overload.overload import FLOOR, NUM_WITHIN, STRICT
from sage_sched.overload.pace import Pace, Work
from sage_sched.overload.situation import MARGIN
from sage_sched.overload.waits import MOST_PERIODS, Newcomer, Repeated
from sage_sched.overload.work import FEW
from sage_sched.policy import Lasting
from sage_sched.steps import StepTime
from tests.sage_sched.strategies import SERVER, core_of, named

CLASSES = {
    "patient": {"ttft_slo_ms": 1e6, "tpot_slo_ms": 1e6},
    "quick": {"ttft_slo_ms": 300.0, "tpot_slo_ms": 1e6, "priority": 1},
    "any": {"priority": 2},
}
SECOND_SLOS = OverloadConfig(enabled=True, max_ttft_ms=1000.0, max_tpot_ms=100.0)


class Door:
    """Receives requests of known lengths, at simulated times."""

    def __init__(self, policy: str = "sage", config: OverloadConfig = SECOND_SLOS) -> None:
        self.policy = named(policy)
        settings = replace(SageConfig.parse({"slo": {"classes": CLASSES}}), overload=config)
        self.core = core_of(self.policy, settings.limits(self.policy))
        self.overload = self.core.limits.overload
        self.server = SERVER
        self.now_s = 0.0
        self.num_asked = 0

    def ask(
        self, *lengths: int, hints: Hints = NO_HINTS, source: str = "history", **about: Any
    ) -> tuple[Job, Newcomer, Refusal | None]:
        """about: may_refuse, others_wait, and the prompt's tokens, with cached and shared ones."""
        known = LengthDistribution.from_samples(list(lengths) * 100, source) if lengths else UNKNOWN
        about = {"input_tokens": 100, "may_refuse": True} | about
        job = Job(self.num_asked, about.pop("input_tokens"), 4096, known, 0, hints=hints)
        self.num_asked += 1
        self.core.now_s = self.now_s
        self.core.arrived(job)
        job.shared_tokens = about.pop("shared_tokens", 0)
        self.core.found(job, about.pop("cached_tokens", 0), 0, self.server)
        newcomer = self.core.newcomer(job, self.server)
        refusal = self.core.refuses(job, newcomer, **about)
        if refusal is not None:
            self.core.ended(job)
        return job, newcomer, refusal

    def refusal(self, *lengths: int, **about: Any) -> Refusal | None:
        return self.ask(*lengths, **about)[2]

    def fill(self, num: int, *lengths: int, **about: Any) -> list[Job]:
        """Add requests that come while none waits, and begin."""
        jobs = [self.ask(*lengths, may_refuse=False, **about)[0] for _ in range(num)]
        for job in jobs:
            job.grow(1)
        self.now_s += 1.0
        return jobs

    def end(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.core.ended(job)


PATIENT = Hints(ttft_slo_ms=1e6, tpot_slo_ms=1e6, slo_class="patient")
LOOSE = Hints(ttft_slo_ms=1e6, tpot_slo_ms=1e6)
LOOSER = Hints(ttft_slo_ms=1e6, tpot_slo_ms=1e6, slo_class="any")
HASTY = Hints(ttft_slo_ms=300.0)
HASTIER = Hints(ttft_slo_ms=1.0, tpot_slo_ms=1.0, slo_class="patient")


@pytest.mark.parametrize(
    ("policy", "crowd", "length", "about", "refused"),
    [
        ("sage", (0, 500), 500, {}, None),
        ("sage", (20, 500), 500, {}, None),
        ("sage", (300, 500), 500, {}, "ttlt"),
        ("sage", (300, 500), 5, {}, None),  # goes first
        ("sage", (200, 5), 500, {"source": "prior"}, None),  # most others are short
        ("sage", (300, 500), 500, {"source": "prior"}, "ttlt"),
        ("sage", (300, 500), 500, {"may_refuse": False}, None),
        ("sage", (300, 500), None, {}, None),
        ("sage", (300, 500), 500, {"hints": PATIENT}, None),
        ("sage", (300, 500), 500, {"hints": LOOSE}, "ttlt"),  # claims loosen no limit
        ("sage", (300, 500), 500, {"hints": LOOSER}, "ttlt"),
        ("sage", (300, 500), 500, {"hints": HASTIER}, "ttlt"),
        ("urgency", (300, 500), 500, {"hints": Hints(urgency=1)}, None),
        ("urgency", (300, 500), 5, {}, None),
        ("urgency", (300, 500), 5, {"hints": Hints(urgency=5)}, "ttft"),
        ("qllm", (300, 500), 500, {"hints": Hints(urgency=1)}, None),
        ("qllm", (300, 500), 5, {}, "ttft"),
        ("fcfs-fill", (300, 500), 5, {}, "ttft"),  # goes last
        ("fcfs-fill", (300, 500), None, {}, None),
        ("fcfs-fill", (20, 500), 5, {}, None),  # there is room
        ("fcfs-fill", (300, 500), 5, {"hints": PATIENT}, None),
        ("fcfs-fill", (300, 500), 5, {"hints": LOOSE}, "ttft"),
        ("fcfs-fill", (60, 20), 5, {}, None),
        ("fcfs-fill", (60, 20), 5, {"hints": HASTY}, "ttft"),
        ("fcfs-fill", (60, 20), 5, {"hints": Hints(slo_class="quick")}, "ttft"),
        ("fcfs-fill", (100, 20), 5, {"hints": HASTY}, "ttft"),
        ("fcfs-fill", (60, 20), 5, {"input_tokens": 9000}, None),  # is slow by itself
    ],
)  # fmt: skip
def test_refused_requests(
    policy: str, crowd: tuple[int, int], length: int, about: dict[str, Any], refused: str | None
) -> None:
    door = Door(policy)
    door.fill(*crowd)
    refusal = door.refusal(*([length] if length else []), **about)
    assert (refusal and refusal.metric) == refused
    if refusal is not None:
        assert (excess_s := refusal.predicted_s - refusal.limit_s) > 0
        assert refusal.retry_after_s == pytest.approx(min(max(1.0, excess_s), 60.0))


def test_a_crowd_that_starts_ahead_of_the_order_takes_several_prefills() -> None:
    door = Door()
    for _ in range(1000):
        door.ask(5, may_refuse=False, input_tokens=1)
    refusal = door.refusal(5)
    assert (refusal and refusal.metric) == "ttft"


def test_jobs_that_their_batch_needs_go_before_a_newcomer() -> None:
    door = Door()
    crowd = [door.ask(500, may_refuse=False)[0] for _ in range(300)]
    refused = []
    for level, is_due in ((BEHIND, False), (0, True), (BEHIND, False)):
        for job in crowd:
            job.put(level, is_due, is_held=False)
        door.now_s += 1.0
        refused.append(door.refusal(5) is not None or door.refusal(50) is not None)
    assert refused == [False, True, False]


def test_prompts_that_are_cached_or_prefilled_take_less_time() -> None:
    door = Door()
    crowd = [door.ask(50, may_refuse=False, input_tokens=1000)[0] for _ in range(30)]
    assert door.refusal(50) is not None
    for job in crowd[:15]:
        job.cached_tokens = 1000
        job.changes()
    for job in crowd[15:]:
        job.prefill(1000)
    door.now_s += 1.0
    assert door.refusal(50) is None


def test_prompts_that_are_too_long_to_start_early_delay_no_short_one() -> None:
    door = Door()
    for _ in range(30):
        door.ask(50, may_refuse=False, input_tokens=5000)
    assert door.refusal(50) is None


def test_requests_that_share_prefills_start_in_less_time() -> None:
    door = Door("fcfs-fill")
    for _ in range(1000):
        door.overload.prefilled(8, 800, 0.0)
    start_s = SERVER.step_time.prefill_base_s / 8
    assert door.ask(50)[1].pace.start_s == pytest.approx(start_s)


@pytest.mark.parametrize("idle_s", [0.0, 1e5])
def test_idle_time_does_not_make_the_next_arrivals_few(idle_s: float) -> None:
    door = Door()
    door.end(door.fill(100, 50))
    door.now_s += idle_s
    newcomer = door.ask(500, may_refuse=False)[1]
    assert newcomer.later.within(1e9) == newcomer.starts.within(1e9) == 0.0
    for _ in range(300):  # short answers overtake it
        door.end([door.ask(50, may_refuse=False)[0]])
        door.now_s += 0.02
    assert door.refusal(500) is not None


@pytest.mark.parametrize("num_before", [0, 20, 600])
def test_after_a_quiet_time_a_rush_counts_at_once(num_before: int) -> None:
    door = Door()
    door.fill(1, 2000)  # it keeps the server busy
    for _ in range(num_before):
        door.end([door.ask(50, may_refuse=False)[0]])
        door.now_s += 1.3
    for _ in range(200):
        door.end([door.ask(50, may_refuse=False)[0]])
        door.now_s += 0.02
    newcomer = door.ask(500, may_refuse=False)[1]
    rush_s, within_s = 200 * newcomer.pace.busy_s(door.ask(50, may_refuse=False)[1].own), 2.0
    assert newcomer.later.within(within_s) == pytest.approx(MARGIN * rush_s / 4 * within_s, rel=0.1)
    goes_on_s = newcomer.later.within(1e9)
    assert goes_on_s == pytest.approx(MOST_PERIODS * MARGIN * rush_s, rel=0.2)


def test_later_arrivals_count_if_they_are_more_than_the_server_serves() -> None:
    """They count once chance cannot explain the surplus."""

    def asked(span_s: float) -> tuple[Work, Newcomer]:
        door = Door("urgency")
        offered = door.ask(500)[1].own  # it keeps the server busy
        for number in range(99):
            door.now_s = span_s * number / 100
            job, newcomer, _ = door.ask(50, may_refuse=False)
            offered += newcomer.own
            door.end([job])
        door.now_s = span_s
        return offered, door.ask(400, may_refuse=False)[1]

    offered, newcomer = asked(1.0)
    busy_s = newcomer.pace.busy_s(offered)
    counted = [asked(busy_s / load)[1].later.within(1e9) / busy_s for load in (1.0, 1.3)]
    assert counted[0] < 0.2 * MOST_PERIODS  # of short periods
    assert counted[1] == pytest.approx(MOST_PERIODS * MARGIN, rel=0.1)


# Ten slots, and 1000 tokens of KV; a step takes 0.1 s, a start 0.5 s. The earlier jobs take 3 s to
# start and 2 s of steps, and fill two batches.
PACE = Pace(replace(SERVER, kv_pool_tokens=1000, max_running_requests=10), 0.1, 0.1, 0.5)
BEFORE = Work(prompts_s=1.0, prefills=4, steps=200, kv_steps=9000, jobs=20, kv=1500)
NEVER = Repeated(np.zeros(0), np.zeros(0))
# 6 s of work arrived in the last 3 s, 2 s of it in the last 0.5 s.
LATER = Repeated(np.array([6.0, 2.0]), np.array([3.0, 0.5]))
WAITS = Newcomer(np.zeros(0), Work(), BEFORE, None, LATER, NEVER, PACE, math.inf)
LONG = replace(WAITS, before=BEFORE._replace(kv_steps=40_000, kv=4000), later=NEVER)


@pytest.mark.parametrize(
    ("newcomer", "within_s", "waited_s", "wait_s"),
    [
        (WAITS, 0.0, 5.0 / 2, 14.5),
        (WAITS, 0.25, 5.0 / 2 + 1.0, 14.5),
        (WAITS, 1.5, 5.0 / 2 + 4.0, 14.5),
        (WAITS, 30.0, 5.0 / 2 + 12.0, 14.5),
        (LONG, 30.0, 7.0 * 3 / 4, 7.0 * 3 / 4),  # limited by the pool
    ],
)
def test_a_newcomer_waits_for_jobs_before_it_and_for_later_ones(
    newcomer: Newcomer, within_s: float, waited_s: float, wait_s: float
) -> None:
    assert newcomer.waited_s(within_s) == pytest.approx(waited_s)
    assert newcomer.wait_s == pytest.approx(wait_s)


@pytest.mark.parametrize(
    ("work_s", "span_s", "seconds", "delayed_s"),
    [
        ([1.0], [4.0], 2.0, 2.0 / 0.75),
        ([1.0], [4.0], 8.0, 10.0),
        ([1.0, 0.25], [4.0, 0.5], 2.0, 2.0 / 0.75),
        ([1.0, 0.5], [4.0, 0.5], 2.0, 3.0),
        ([], [], 2.0, 2.0),
    ],
)
def test_work_takes_longer_if_other_work_comes_first(
    work_s: list[float], span_s: list[float], seconds: float, delayed_s: float
) -> None:
    found = Repeated(np.array(work_s), np.array(span_s)).delayed_s(seconds)
    assert found == pytest.approx(delayed_s)


def test_a_cached_prompt_is_no_work_and_shared_kv_counts_once() -> None:
    door = Door("fcfs-fill")

    def ask(cached_tokens: int, shared_tokens: int) -> Newcomer:
        cached = {"cached_tokens": cached_tokens, "shared_tokens": shared_tokens}
        return door.ask(50, may_refuse=False, input_tokens=5000, **cached)[1]

    whole, cached, shared = ask(0, 0), ask(4900, 0), ask(4900, 4900)
    prompt_s = SERVER.step_time.prompt_s
    assert whole.own.prompts_s == pytest.approx(prompt_s(0, 5000))
    assert cached.own.prompts_s == shared.own.prompts_s == pytest.approx(prompt_s(4900, 100))
    assert whole.own.kv == cached.own.kv == shared.own.kv + 4900


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
@pytest.mark.parametrize(
    ("num_running", "ttft_ms", "tpot_ms", "refused"),
    [
        (5, 1000.0, 100.0, None),
        (30, 1000.0, 100.0, "ttlt"),
        (30, 1000.0, 500.0, None),
        (30, 1000.0, math.inf, None),
        (30, math.inf, 100.0, None),  # nor is it while others wait
    ],
)
def test_a_batch_with_room_may_be_too_slow(
    policy: str, num_running: int, ttft_ms: float, tpot_ms: float, refused: str | None
) -> None:
    """Each job reads the shared prefix, which takes memory once."""
    config = OverloadConfig(enabled=True, max_ttft_ms=ttft_ms, max_tpot_ms=tpot_ms)
    door = Door(policy, config)
    about = {"input_tokens": 16000, "cached_tokens": 15900, "shared_tokens": 15900}
    door.fill(num_running, 200, **about)
    refusal = door.refusal(200, **about, others_wait=False)
    assert (refusal and refusal.metric) == refused


@pytest.mark.parametrize("factor", [0.1, 0.99, 1.01])
def test_other_step_times_leave_the_order_as_it_is(factor: float) -> None:
    door = Door()
    for _ in range(200):
        door.ask(500, may_refuse=False)
        door.now_s += 0.01
    counts = [door.ask(500, may_refuse=False)[1].before.jobs]
    overtaking = [door.ask(500, may_refuse=False)[1].later.within(1e9)]
    coefficients = (factor * seconds for seconds in astuple(SERVER.step_time))
    door.server = replace(SERVER, step_time=StepTime(*coefficients))
    door.policy.on_server(door.server)
    newcomer = door.ask(500, may_refuse=False)[1]
    assert [*counts, newcomer.before.jobs] == pytest.approx([200, 202], rel=FEW)
    assert [*overtaking, newcomer.later.within(1e9)] == [0.0, 0.0]
    prompts_s = newcomer.before.jobs * newcomer.own.prompts_s
    assert newcomer.before.prompts_s == pytest.approx(prompts_s)


def test_an_arrival_looks_at_no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    door, looked_at = Door(), list[Job]()
    crowd = [door.ask(5 + number % 400, may_refuse=False)[0] for number in range(3000)]
    original = door.policy.lasting

    def lasting(job: Job) -> Lasting:
        looked_at.append(job)
        return original(job)

    monkeypatch.setattr(door.policy, "lasting", lasting)
    newcomers = []
    for _ in range(20):
        door.now_s += 0.01
        newcomers.append(door.ask(100, may_refuse=False)[0])
    assert looked_at == newcomers
    crowd[7].grow(1)
    door.now_s += 1.0
    late, newcomer, _ = door.ask(100, may_refuse=False)
    assert looked_at == [*newcomers, late, crowd[7]]
    # Columns of several jobs are as good as a column for each.
    shorter = sum(1 for number in range(3000) if 5 + number % 400 <= 100)
    assert newcomer.before.jobs == pytest.approx(shorter + 20, rel=0.05)


@pytest.mark.parametrize(("lengths", "source"), [((500,), "prior"), ((), "")])
def test_while_the_predictor_is_dead_nothing_is_refused(
    lengths: tuple[int, ...], source: str
) -> None:
    door = Door()
    door.fill(300, *lengths, source=source)
    assert not any(door.refusal(*lengths, source=source) for _ in range(200))
    assert door.refusal(500) is None  # one prediction is not enough


def test_the_floor_admits_one_in_many_requests() -> None:
    door = Door("fcfs-fill")
    door.fill(300, 500)
    assert all(door.refusal(500) for _ in range(3 * FLOOR))  # a flood opens nothing
    for _ in range(FLOOR):
        assert door.refusal(500, hints=PATIENT) is None
    assert [door.refusal(500) is None for _ in range(3)] == [True, False, False]


def test_refused_clients_come_back_one_after_another() -> None:
    door = Door("fcfs-fill")
    door.fill(100, 20)
    refusals = [door.refusal(5, hints=HASTY) for _ in range(100)]
    retries_s = [refusal.retry_after_s for refusal in refusals if refusal is not None]
    gaps_s = np.diff(retries_s)
    _, newcomer, _ = door.ask(5, hints=HASTY)
    assert len(retries_s) == 100
    first = door.refusal(5, hints=HASTY)
    assert first is not None
    assert retries_s[0] == pytest.approx(max(1.0, first.predicted_s - first.limit_s), rel=0.1)
    busy_s = newcomer.pace.busy_s(newcomer.own)
    assert gaps_s[0] == pytest.approx(busy_s, rel=0.01)
    assert (gaps_s >= 0).all()
    assert retries_s[-1] == pytest.approx(min(60.0, retries_s[0] + 99 * busy_s), rel=0.01)
    # After they have come, the next one need not wait for them.
    door.now_s += 60.0
    late = door.refusal(5, hints=HASTY)
    assert late is not None
    assert late.retry_after_s == pytest.approx(retries_s[0], rel=0.2)


def test_the_predicted_first_token_counts_how_long_a_start_is_held() -> None:
    door = Door(config=OverloadConfig(enabled=True))
    for _ in range(200):
        door.ask(500, may_refuse=False)
        door.now_s += 0.1
    newcomer = door.ask(500, may_refuse=False)[1]
    assert newcomer.ttft_s == pytest.approx(newcomer.start_s + newcomer.pace.held_s)
    hasty = door.ask(500, may_refuse=False, hints=HASTY)[1]
    assert hasty.start_s <= hasty.ttft_s <= max(hasty.start_s, 0.3)


@pytest.mark.parametrize(("policy", "length"), [("fcfs-fill", 5), ("sage", 500)])
def test_limits_are_stricter_after_a_refusal_until_all_are_within(policy: str, length: int) -> None:
    """Hysteresis: a server at its limit does not alternate between refusing and admitting."""
    door, limits_s = Door(policy), []
    for _ in range(2):
        crowd = door.fill(300, 500)
        for _ in range(2):
            refusal = door.refusal(length)
            assert refusal is not None
            limits_s.append(refusal.limit_s)
            door.end([door.ask(length, hints=PATIENT)[0]])  # one within is not enough
        door.end(crowd)
        for _ in range(NUM_WITHIN):
            door.now_s += 1.0
            job, _, refusal = door.ask(length)
            assert refusal is None
            door.end([job])
    assert limits_s == pytest.approx(2 * [limits_s[0], STRICT * limits_s[0]])


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
@pytest.mark.parametrize("jump_s", [0.0, 60.0, 1e9, -1e9])
def test_after_a_clock_jump_it_goes_on(policy: str, jump_s: float) -> None:
    door = Door(policy)
    jobs = door.fill(300, 500)
    door.now_s += jump_s
    assert door.refusal(500) is not None
    door.end(jobs)
    door.now_s += 1.0
    assert door.refusal(500) is None
