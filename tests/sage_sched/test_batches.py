"""Batches with a finish time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.simulator.presets import PRESETS
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from sage_sched.app.config import SageConfig
from sage_sched.batches import Batches
from sage_sched.job import BEHIND, BatchPart, Job
from tests.sage_sched.situations import Story
from tests.sage_sched.strategies import SERVER, known

STEP_S = SERVER.step_time.decode_s(1, 0)
ENGINE = replace(PRESETS["h800-qwen3-32b"], max_running_requests=8)


def part_of(done_in_s: float, number: int = 4, name: str = "b") -> BatchPart:
    return BatchPart(name, number, done_in_s)


def job_of(part: BatchPart | None, arrival: int = 0, tokens: int = 100) -> Job:
    return Job(arrival, 10, 4096, known(tokens), 0, batch=part)


def story(done_in_s: float, number: int = 1) -> Story:
    """Request 1 belongs to a batch with answers of 200 tokens. The others are online."""
    made = Story("sage", ttft_ms=math.inf, regret=math.inf)
    made.view("wait 1:10%200")
    made.jobs[1].batch = part_of(done_in_s, number)
    made.core.limits.arrived(made.jobs[1])
    return made


@pytest.mark.parametrize(
    ("situation", "behind", "due"),
    [
        ("wait 1:10%200 2:10%900", "+2 +1", "+1 +2"),
        # Jobs behind are preempted at any price. So are others, for a job that its batch needs.
        ("full; run 1:10%200+9=200; wait 2:10%900", "-1 +2", "2"),
        ("full; run 2:10%900+9=200; wait 1:10%200", "1", "-2 +1"),
        ("short; host 999; run 1:10%200+9 2:10%900+9", "-1", "-2"),
    ],
)
def test_a_batch_is_behind_others_until_its_time_is_short(
    situation: str, behind: str, due: str
) -> None:
    for done_in_s, plan in ((1e6, behind), (200 * STEP_S, due)):
        made = story(done_in_s)
        made.core.limits.batches._looked_s = -math.inf
        assert made.plan(f"{situation}; move 1") == plan, done_in_s


def test_as_many_go_first_as_the_work_left_needs() -> None:
    for left_share, number in ((4.0, 0), (1.5, 1), (0.9, 2), (0.4, 4)):
        made = Story("sage")
        # Four of eight have come, each with 100 tokens to go.
        made.view("wait " + " ".join(f"{n}:10%100" for n in range(4)))
        for job in made.jobs.values():
            job.batch = part_of(800 * STEP_S * left_share / 2 + 50 * STEP_S, 8)
            made.core.limits.arrived(job)
        made.plan("wait " + " ".join(f"{n}:10" for n in range(4)))
        (report,) = made.core.limits.batches.reports(SERVER, 0.0)
        assert report.num_first == number
        assert sum(job.is_due for job in made.jobs.values()) == number
        assert all(job.is_due == (job.level == 0) for job in made.jobs.values())


def test_among_online_requests_jobs_start_some_at_a_time() -> None:
    for others, number in (("; run 99:10%100+9", 8), ("", 40)):
        made = Story("sage")
        waiting = "wait " + " ".join(f"{n}:10%100" for n in range(40))
        made.view(waiting + others)
        jobs = [made.jobs[n] for n in range(40)]
        for job in jobs:
            job.batch = part_of(100.0, 40)
            made.core.limits.arrived(job)
        made.plan(waiting + others)
        assert sum(not job.is_held for job in jobs) == number
    batch = made.core.limits.batches.of(jobs[0])
    assert batch is not None
    assert batch.open(0.0, set()) == 8
    for job in jobs[:5]:
        job.grow(1)
    assert [batch.open(now_s, set()) for now_s in (3.9, 4.0, 4.1)] == [8, 13, 13]


def test_long_answers_go_first_and_short_ones_start_among_others() -> None:
    batches = Batches()
    jobs = [job_of(part_of(1e6, 6), n, tokens) for n, tokens in enumerate([30, 90, 50, 70, 10, 20])]
    for job in jobs:
        batches.arrived(job)
    batch = batches.of(jobs[0])
    assert batch is not None
    batch.num_due = 2
    assert batch.order(4, 1e6, set()) == [jobs[n] for n in (1, 3, 4, 5)]
    assert batch.order(4, 1e6, {jobs[4]}) == [jobs[n] for n in (4, 1, 5, 0)]
    # A job without time to wait goes before a running one.
    assert batch.order(2, 60.0, {jobs[4]}) == [jobs[n] for n in (1, 3)]


def test_an_answer_longer_than_predicted_has_no_time_to_wait() -> None:
    for age_tokens, is_due in ((90, False), (120, True)):
        made = Story("sage")
        situation = f"run 0:10%100+{age_tokens} 1:10%100+9"
        made.view(situation)
        made.jobs[0].batch = part_of(1000 * STEP_S, 1)
        made.core.limits.arrived(made.jobs[0])
        made.plan(situation + "; wait 2:10")
        assert made.jobs[0].is_due == is_due


def test_an_impossible_batch_is_refused_as_a_whole() -> None:
    batches, least_s = Batches(), 100 * STEP_S
    soon, late = part_of(least_s / 2), part_of(10 * least_s)

    def refuses(job: Job) -> bool:
        batches.arrived(job)
        refusal = batches.refuses(job, SERVER, 0.0)
        assert refusal is None or refusal.least_s > refusal.left_s
        return refusal is not None

    assert refuses(job_of(soon))
    assert refuses(job_of(soon, 1, tokens=5))  # alone it would look possible
    assert not batches.reports(SERVER, 0.0)
    assert not refuses(job_of(late, 2))
    # Later jobs of an admitted batch are admitted. Batches with earlier finish times count.
    assert not refuses(job_of(soon, 3))
    assert refuses(job_of(part_of(9 * least_s, 1000, "c"), 4))
    assert not refuses(job_of(part_of(11 * least_s, 4, "d"), 5))
    assert not refuses(job_of(None, 6))


def test_progress_and_the_predicted_end_are_known() -> None:
    batches, jobs = Batches(), [job_of(part_of(9.0, 2), n) for n in range(2)]
    for job in jobs:
        batches.arrived(job)
    (report,) = batches.reports(SERVER, 1.0)
    assert (report.num_requests, report.num_arrived, report.num_ended) == (2, 2, 0)
    assert 0 < report.predicted_in_s < report.done_in_s == 8.0
    for job in jobs:
        batches.ended(job, 3.0)
    (report,) = batches.reports(SERVER, 4.0)
    assert (report.num_ended, report.predicted_in_s, report.in_time) == (2, -1.0, True)


def test_no_more_go_first_than_are_left() -> None:
    batches, jobs = Batches(), [job_of(part_of(9.0, 3), n) for n in range(3)]
    for job in jobs:
        batches.arrived(job)
    batch = batches.of(jobs[0])
    assert batch is not None
    batch.num_due = 3
    batches.withdrawn(jobs[0])
    batches.ended(jobs[1], 1.0)
    assert batches.reports(SERVER, 1.0)[0].num_first == 1


def test_a_report_changes_nothing() -> None:  # only one rank makes some of them
    batches, job = Batches(), job_of(part_of(9.0, 1))
    batches.arrived(job)
    job.generated_tokens = 90
    batch = batches.of(job)
    assert batch is not None
    before = batch.left_tokens(1.0)
    batches.reports(SERVER, 1.0)
    assert batch.left_tokens(1.0) == before


def test_jobs_that_never_come_delay_no_batch_after_their_time() -> None:
    batches, lost, later = Batches(), job_of(part_of(1e6, 1_000_000)), part_of(100.0, 4, "c")
    batches.arrived(lost)
    batches.ended(lost, 1.0)
    # None of its jobs is here, so they delay nothing.
    assert served_from(batches, later, 2.0)
    other = Batches()
    other.arrived(job_of(part_of(50.0, 1_000_000)))
    assert not served_from(other, later, 2.0)
    assert served_from(other, later, 60.0)


def served_from(batches: Batches, part: BatchPart, now_s: float) -> bool:
    """Whether a batch is admitted if its first job comes now."""
    job = job_of(part, 9)
    job.arrival_s = now_s
    batches.arrived(job)
    return batches.refuses(job, SERVER, now_s) is None


def test_jobs_may_come_again_and_a_smaller_batch_too() -> None:
    batches = Batches()
    jobs = [job_of(part_of(100.0, 3), n) for n in range(3)]
    for job in jobs:
        batches.arrived(job)
    batches.withdrawn(jobs[0])
    batches.ended(jobs[0], 1.0)
    batches.arrived(job_of(part_of(100.0, 3), 4))
    (report,) = batches.reports(SERVER, 1.0)
    assert (report.num_requests, report.num_arrived, report.num_ended) == (3, 3, 0)
    # One job too many is served behind others, and the batch is unchanged.
    extra = job_of(part_of(1e-3, 900), 5)
    batches.arrived(extra)
    assert batches.refuses(extra, SERVER, 1.0) is None
    assert batches.reports(SERVER, 1.0) == [report]
    assert extra.level == BEHIND
    # A batch of another tenant is another one.
    other = job_of(part_of(1e-3), 6)
    other.hints = replace(other.hints, tenant="t")
    batches.arrived(other)
    assert batches.refuses(other, SERVER, 1.0) is not None
    assert not served_from(batches, part_of(100.0, 1_000_000, "d"), 1.0)
    assert served_from(batches, part_of(100.0, 10, "d"), 1.0)


def test_cached_prompts_take_no_time() -> None:
    batches, jobs = Batches(), [job_of(part_of(900.0, 4), n) for n in range(2)]
    for job in jobs:
        batches.arrived(job)
    batch = batches.of(jobs[0])
    assert batch is not None
    prompt_s = SERVER.step_time.prompt_s
    assert batch.prompts_s(0.0, SERVER.step_time) == pytest.approx(4 * prompt_s(0, 10))
    # Because others have the same prefix, jobs without a look-up may have it too.
    jobs[1].cached_tokens, jobs[1].was_looked_up = 9, True
    batch.look()
    assert batch.prompts_s(0.0, SERVER.step_time) == pytest.approx(4 * prompt_s(9, 1))


def test_jobs_beyond_the_size_of_a_batch_do_not_count_as_running() -> None:
    made = Story("sage")
    made.view("run " + " ".join(f"{n}:10%100+9" for n in range(3)))
    for job in made.jobs.values():
        job.batch = part_of(1e6, 2)
        made.core.limits.arrived(job)
    batch = made.core.limits.batches.of(made.jobs[0])
    assert batch is not None
    made.plan("run " + " ".join(f"{n}:10+9" for n in range(3)) + "; wait 9:10")
    assert batch.num_running == 2


def test_prefills_take_time_first() -> None:
    found = []
    for input_tokens in (10, 8000):
        made = Story("sage")
        made.view(f"wait 1:{input_tokens}%100")
        made.jobs[1].batch = part_of(100 * STEP_S + 1.0, 1)
        made.core.limits.arrived(made.jobs[1])
        made.plan(f"wait 1:{input_tokens}")
        found.append(made.core.limits.batches.reports(SERVER, 0.0)[0].predicted_in_s)
    assert found[1] - found[0] == pytest.approx(
        float(SERVER.step_time.prompt_s(0, 8000) - SERVER.step_time.prompt_s(0, 10)), rel=0.2
    )


def served(done_in_s: float) -> Result:
    """Serve forty online requests, one per 1.5 s, and a batch of 40, on eight slots."""
    lengths = known(100, 200, 300)
    online = [
        SimRequest(1.5 * n, 50, 100 * (1 + n % 3), 4096, lengths, "online") for n in range(40)
    ]
    part = part_of(done_in_s, 40)
    batch = [replace(request, arrival_s=0.5, class_name="batch", batch=part) for request in online]
    return simulate(ENGINE, "sage", SageConfig(), sorted([*online, *batch], key=_came))


def _came(request: SimRequest) -> float:
    return request.arrival_s


def test_a_batch_among_online_requests_is_done_in_time() -> None:
    found = {done_in_s: served(done_in_s) for done_in_s in (70.0, 100.0, 1000.0)}
    ends = {at: float(of.only(["batch"]).ttlt_s.max()) for at, of in found.items()}
    assert ends[70.0] < 70
    assert ends[100.0] < 100
    online = [float(of.only(["online"]).ttlt_s.mean()) for of in found.values()]
    # The less time it has, the more the others wait.
    assert online == sorted(online, reverse=True)
    refused = served(5.0)
    assert refused.num_refused == 40
