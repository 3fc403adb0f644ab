"""A scripted scheduler with a starved pool, run at random, on two ranks that must decide alike."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from sage_sched.candidates import WINDOW
from sage_sched.job import Job
from sage_sched.plan import PreemptionMode
from sage_sched.policy import NoParameters, Policy
from sage_sched.preemption import plan_admissions
from sage_sched.preemption_cost import PreemptionCost
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import IDLE, SERVER

NUM_STEPS = 5_000
NUM_SLOTS = 5
MAX_YIELDS = 3


class Restless(Policy):
    """By a level that worsens with age, so that plans change all the time."""

    def key(self, job: Job, view: SchedulerView) -> float:
        assert isinstance(job.memo, int)
        return float(job.memo + job.generated_tokens // 8)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return self.key(waiting, view) < self.key(running, view)


POLICY = Restless(NoParameters(), SERVER)


@dataclass
class Rank:
    """One scheduler: a paged pool, a running batch, a queue, and who is done or gone, by arrival.

    ratio: the share of a running answer's rest that is set aside, so that below 1 the pool may run
    out, as in SGLang.
    """

    page_size: int
    pool_tokens: int
    ratio: float
    rng: random.Random
    running: dict[int, Job] = field(default_factory=dict)
    waiting: dict[int, Job] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    num_preemptions: int = 0

    def held_tokens(self, job: Job) -> int:
        pages = -(-(job.input_tokens + job.generated_tokens) // self.page_size)
        return pages * self.page_size

    def free_tokens(self) -> int:
        return self.pool_tokens - sum(self.held_tokens(job) for job in self.running.values())

    def arrive(self, arrival: int, input_tokens: int, cap: int, length: int, level: int) -> None:
        self.waiting[arrival] = Job(arrival, input_tokens, cap, None, 0, memo=level)
        self.lengths[arrival] = length

    def abort(self, arrival: int) -> None:
        if self.running.pop(arrival, None) or self.waiting.pop(arrival, None):
            self.ended.add(arrival)

    def step(self) -> list[tuple[int, tuple[int, ...]]]:
        """Plan, carry it out, decode a token each; who got in, and who preempted to whom."""
        turns = self.take_turns()
        assert self.free_tokens() >= 0
        self.make_room_to_decode()
        for job in list(self.running.values()):
            job.generated_tokens += 1
            if job.generated_tokens >= self.lengths[job.arrival]:
                self.abort(job.arrival)
        assert self.free_tokens() >= 0
        return turns

    def take_turns(self) -> list[tuple[int, tuple[int, ...]]]:
        reserved = {
            job.arrival: int((job.max_new_tokens - job.generated_tokens) * self.ratio)
            for job in self.running.values()
        }
        freed = {
            job: self.held_tokens(job) + reserved[job.arrival] for job in self.running.values()
        }
        batch = list(freed)
        self.rng.shuffle(batch)  # in what order a batch holds its requests decides nothing
        queue = sorted(self.waiting.values(), key=lambda job: (POLICY.key(job, IDLE), job.arrival))
        candidates = [
            (job, job.input_tokens + job.max_new_tokens + self.page_size) for job in queue[:WINDOW]
        ]
        free_tokens = self.free_tokens() - sum(reserved.values())
        free_slots = NUM_SLOTS - len(self.running)
        turns = plan_admissions(
            batch,
            candidates,
            free_slots=free_slots,
            free_tokens=free_tokens,
            prefill_tokens=IDLE.pass_tokens,
            policy=POLICY,
            view=IDLE,
            max_preemptions=MAX_YIELDS,
            cost_of=lambda job: PreemptionCost(PreemptionMode.SWAP, 0.0, freed[job]),
        )
        assert [turn.newcomer for turn in turns] == queue[: len(turns)]
        done = []
        for turn, candidate in zip(turns, candidates, strict=False):
            yielding = tuple(victim.job for victim in turn.victims)
            free_slots, free_tokens = self.carry_out(
                candidate, yielding, freed, free_slots, free_tokens
            )
            done.append((turn.newcomer.arrival, tuple(job.arrival for job in yielding)))
        return done

    def carry_out(
        self,
        candidate: tuple[Job, int],
        yielding: tuple[Job, ...],
        freed: dict[Job, int],
        free_slots: int,
        free_tokens: int,
    ) -> tuple[int, int]:
        """One turn; the slots and tokens that are free after it. Each victim is needed."""
        gained = sum(freed[job] for job in yielding)
        for job in yielding:
            assert POLICY.should_preempt(job, candidate[0], 0.0, IDLE)
            enough_slots = free_slots + len(yielding) - 1 > 0
            enough_tokens = free_tokens + gained - freed[job] > candidate[1]
            assert not (enough_slots and enough_tokens)
            self.yield_slot(job)
            job.num_preemptions += 1
            assert job.num_preemptions <= MAX_YIELDS
            self.num_preemptions += 1
        free_slots += len(yielding) - 1
        free_tokens += gained - candidate[1]
        assert free_slots >= 0
        assert free_tokens > 0
        newcomer = candidate[0]
        self.running[newcomer.arrival] = self.waiting.pop(newcomer.arrival)
        return free_slots, free_tokens

    def make_room_to_decode(self) -> None:
        """As SGLang retracts when the pool runs out: the worst goes."""
        while len(self.running) * self.page_size > self.free_tokens() and self.running:
            self.yield_slot(max(self.running.values(), key=lambda job: (job.memo, job.arrival)))

    def yield_slot(self, job: Job) -> None:
        self.waiting[job.arrival] = self.running.pop(job.arrival)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_twice_and_two_ranks_decide_alike(seed: int) -> None:
    script = random.Random(seed)
    page_size, ratio = (1, 16)[seed % 2], (1.0, 0.3)[seed // 2]
    ranks = [Rank(page_size, 640, ratio, random.Random(rank)) for rank in range(2)]
    num_arrivals = 0
    for step in range(NUM_STEPS):
        if step < 0.9 * NUM_STEPS and script.random() < (0.06 if ratio == 1.0 else 0.08):
            cap = script.randint(2, 150)
            what = (script.randint(1, 120), cap, script.randint(1, cap), script.randrange(6))
            for rank in ranks:
                rank.arrive(num_arrivals, *what)
            num_arrivals += 1
        if script.random() < 0.005 and num_arrivals:
            leaver = script.randrange(num_arrivals)
            for rank in ranks:
                rank.abort(leaver)
        first, second = (rank.step() for rank in ranks)
        assert first == second
        for rank in ranks:
            assert sorted([*rank.running, *rank.waiting, *rank.ended]) == list(range(num_arrivals))
            assert len(rank.running) <= NUM_SLOTS
    # Arrivals have ceased: who yields still gets a turn.
    assert len(ranks[0].ended) == num_arrivals
    assert ranks[0].num_preemptions > 100
