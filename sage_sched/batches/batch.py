"""Keeps the jobs of a batch, and predicts the work that is left."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice

from sage_sched.job import BatchPart, Job
from sage_sched.steps import ServerFacts

# What is left of an answer is predicted again after this many tokens.
_INTERVAL_TOKENS = 32
# An answer is taken to be no longer than this quantile.
_LONG = 0.9
# The part of the longest answer's time in which few others run.
_TAIL = 0.5
# The share of a batch's time that is kept for answers that take longer than predicted.
_SPARE = 0.05
# So many times as many as it needs may run beside others.
_PACE = 2.0


@dataclass(slots=True)
class Left:
    """The mean and the largest number of tokens that an answer is expected to need, from an age
    on."""

    age_tokens: int
    mean: float
    most: float


def left_of(job: Job) -> Left:
    """Return what is left of a job's answer. An answer that is longer than all known ones is
    expected to go on for as long as it has been going."""
    age, cap_tokens = job.generated_tokens, job.max_new_tokens
    if job.has_fixed_length or job.distribution is None:
        left = float(max(1, cap_tokens - age))
        return Left(age, left, left)
    lengths = job.distribution.capped(cap_tokens).surviving(age)
    if lengths is None:
        left = float(max(1, min(2 * age, cap_tokens) - age))
        return Left(age, left, left)
    return Left(age, lengths.mean() - age, float(lengths.quantile(_LONG) - age))


@dataclass(slots=True)
class Batch:
    """A batch of which at least one job has come.

    part: as the latest job said it. done_s: when all of it has to be done.
    jobs: the unfinished ones, by arrival. num_arrived, num_ended: of all its jobs.
    num_due: how many of its jobs go first, so that it is done in time.
    num_running: a moving average.
    """

    part: BatchPart
    latest: Job
    jobs: dict[Job, Left] = field(default_factory=dict)
    num_arrived: int = 0
    num_ended: int = 0
    num_due: int = 0
    num_running: float = 0.0
    ended_s: float = math.nan
    _known_tokens: float = 0.0
    _input_tokens: int = 0

    @property
    def done_s(self) -> float:
        return self.latest.arrival_s + self.part.done_in_s

    @property
    def num_requests(self) -> int:
        return max(self.part.num_requests, self.num_arrived)

    @property
    def num_to_come(self) -> int:
        return self.num_requests - self.num_arrived

    def add(self, job: Job) -> None:
        assert job.batch is not None
        self.part, self.latest = job.batch, job
        left = self.jobs[job] = left_of(job)
        self.num_arrived += 1
        self._known_tokens += left.mean
        self._input_tokens += job.input_tokens

    def end(self, job: Job, now_s: float) -> None:
        del self.jobs[job]
        self.num_ended += 1
        self.ended_s = now_s

    def look(self) -> None:
        """Predict again what is left of answers that have grown."""
        for job, left in self.jobs.items():
            if job.generated_tokens >= left.age_tokens + _INTERVAL_TOKENS:
                self.jobs[job] = left_of(job)

    @property
    def left_tokens(self) -> float:
        """The tokens that its jobs still need. Jobs that have not come count as much as the mean of
        those that have."""
        to_come = self.num_to_come * self._known_tokens / max(1, self.num_arrived)
        return sum(left.mean for left in self.jobs.values()) + to_come

    @property
    def longest_tokens(self) -> float:
        """The tokens that its longest answer still needs."""
        return max((left.most for left in self.jobs.values()), default=0.0)

    def needed(self, now_s: float, token_s: float) -> tuple[int, int]:
        """Return how many of its jobs have to run from now on, and how many may run beside others.

        As many have to run as bring the answers to an end while the longest one is half done, and
        all whose own answers take the time left. A batch that is late has its whole time again.

        token_s: seconds from token to token of a running job.
        """
        left_s, spare_s = self.done_s - now_s, _SPARE * self.part.done_in_s
        is_late = left_s <= 0
        if is_late:
            left_s = self.part.done_in_s
        elif left_s > spare_s:
            left_s -= spare_s
        steps = left_s / token_s
        number = int(self.left_tokens / max(1.0, steps - _TAIL * self.longest_tokens)) + is_late
        latest = sum(left.most >= steps for left in self.jobs.values())
        number = max(number, latest)
        return min(len(self.jobs), number), max(number, int(_PACE * self.left_tokens / steps) + 1)

    def first(self, number: int, running: set[Job]) -> set[Job]:
        """Return the jobs that go first: those that run, those that have run, and then the
        longest."""
        if not number:
            return set()

        def place(job: Job) -> tuple[bool, bool, float, int]:
            left = self.jobs[job]
            return job not in running, not job.generated_tokens, -left.most, job.arrival

        return {*islice(sorted(self.jobs, key=place), number)}

    def left_in_s(self, token_s: float) -> float:
        """Return the predicted time until it is done, if as many run as lately."""
        together = min(max(self.num_running, self.num_due, 1.0), len(self.jobs) + self.num_to_come)
        return token_s * max(self.left_tokens / max(1.0, together), self.longest_tokens)

    def least_s(self, server: ServerFacts, other_tokens: float = 0.0) -> float:
        """Return the time that it takes at least, if the server serves only it and other_tokens."""
        input_tokens = self._input_tokens / self.num_arrived
        mean_tokens = self._known_tokens / self.num_arrived
        kv_tokens = input_tokens + mean_tokens / 2
        number = min(server.max_running_requests, server.kv_pool_tokens // max(1, int(kv_tokens)))
        if not other_tokens:
            number = min(number, len(self.jobs) + self.num_to_come)
        number = max(1, number)
        step_time = server.step_time
        tokens = self.left_tokens + other_tokens
        prompts_s = self.num_to_come * float(step_time.prompt_s(0, input_tokens))
        steps_s = tokens / number * step_time.decode_s(number, int(number * kv_tokens))
        longest_s = mean_tokens * step_time.decode_s(1, int(kv_tokens))
        return max(prompts_s + steps_s, longest_s)
