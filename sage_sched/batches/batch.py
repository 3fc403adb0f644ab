"""Keeps the jobs of a batch, and predicts the work that is left."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sage_sched.job import BatchPart, Job
from sage_sched.steps import ServerFacts, StepTime

# The rest of an answer is predicted again after this many tokens.
_INTERVAL_TOKENS = 32
# An answer is assumed to be no longer than this quantile, until it is.
_LONG = 0.95
# The part of the longest answer's time in which few others run.
_TAIL = 0.5
# The share of a batch's time that is kept for answers that take longer than predicted.
_SPARE = 0.05
# Jobs start together at intervals of these seconds, so that they share prefill steps. All have
# started after this share of the batch's time, because an answer has to be long before it shows
# that it is longer than predicted.
_TOGETHER_S, _STARTS = 4.0, 0.2
# Prefills take this many times their own time, because prefills of other requests come between.
_BETWEEN = 1.5


@dataclass(slots=True)
class Left:
    """The mean and the largest number of tokens that an answer is expected to need, from an age
    on."""

    age_tokens: int
    mean: float
    most: float


def left_of(job: Job) -> Left:
    """Return the rest of a job's answer. An answer longer than all known ones is expected to become
    twice as long. An unusually long one may reach its cap."""
    age, cap_tokens = job.generated_tokens, job.max_new_tokens
    if job.has_fixed_length or not job.is_predicted:
        left = float(max(1, cap_tokens - age))
        return Left(age, left, left)
    lengths = job.distribution.capped(cap_tokens)
    longer = lengths.surviving(age)
    mean = min(2 * age, cap_tokens) if longer is None else longer.mean()
    most = lengths.quantile(_LONG)
    return Left(age, max(1.0, mean - age), max(1.0, (most if age < most else cap_tokens) - age))


def due_s(job: Job) -> float:
    """Return when the batch of this job has to be done, as the job says."""
    assert job.batch is not None
    return job.arrival_s + job.batch.done_in_s


def _has_begun(job: Job, running: set[Job]) -> bool:
    return job in running or job.generated_tokens > 0


@dataclass(slots=True)
class Batch:
    """A batch of which at least one job has come.

    part: as stated by its first job. latest: the job that gives it the most time. A job's arrival
        is dated after Batch.add.
    jobs: the unfinished ones, by arrival. num_arrived, num_ended: of all its jobs.
    num_due: how many of its jobs go first, so that it is done in time.
    num_running: a moving average.
    new_share: the part of its prompts that needs a prefill, because no other request has left it in
        the cache. All of it until a plan has looked; nothing on a decode server.
    """

    part: BatchPart
    latest: Job
    jobs: dict[Job, Left] = field(default_factory=dict)
    num_arrived: int = 0
    num_ended: int = 0
    num_due: int = 0
    num_running: float = 0.0
    new_share: float = 1.0
    ended_s: float = math.nan
    _num_open: int = 0
    _opened_s: float = -math.inf
    _known_tokens: float = 0.0
    _input_tokens: float = 0.0

    @property
    def done_s(self) -> float:
        """The time by which all of it has to be done."""
        return due_s(self.latest)

    def num_to_come(self, now_s: float) -> int:
        """Return how many more of its jobs are expected here, if its servers share them evenly.
        None is expected after its time."""
        if now_s >= self.done_s:
            return 0
        return max(0, -(-self.part.num_requests // self.part.num_servers) - self.num_arrived)

    def is_over(self, now_s: float) -> bool:
        return not self.jobs and not self.num_to_come(now_s)

    def add(self, job: Job) -> None:
        left = self.jobs[job] = left_of(job)
        if not self.num_arrived:
            self.new_share = 1 - job.cached_input_tokens / max(1, job.input_tokens)
        if due_s(job) > self.done_s:
            self.latest = job
        self.num_arrived += 1
        self._known_tokens += left.mean
        self._input_tokens += job.input_tokens

    def end(self, job: Job, now_s: float) -> None:
        self._remove(job)
        self.num_ended += 1
        self.ended_s = now_s

    def withdraw(self, job: Job) -> None:
        """Note that a job was aborted or refused. It may come again."""
        self._remove(job)
        share = 1 - 1 / self.num_arrived
        self._known_tokens *= share
        self._input_tokens *= share
        self.num_arrived -= 1

    def _remove(self, job: Job) -> None:
        del self.jobs[job]
        self.num_due = min(self.num_due, len(self.jobs))

    def look(self) -> None:
        """Predict the rest of answers that have grown, and the cached part of prompts, again."""
        asked = [job for job in self.jobs if job.was_looked_up and not job.generated_tokens]
        if asked:
            cached_tokens = sum(job.cached_input_tokens for job in asked)
            self.new_share = 1 - cached_tokens / max(1, sum(job.input_tokens for job in asked))
        for job, left in self.jobs.items():
            if job.generated_tokens >= left.age_tokens + _INTERVAL_TOKENS:
                self.jobs[job] = left_of(job)

    def left_tokens(self, now_s: float) -> float:
        """Return the tokens that its jobs still need. A job that has not come counts as the mean of
        the jobs that have."""
        to_come = self.num_to_come(now_s) * self._known_tokens / self.num_arrived
        return sum(left.mean for left in self.jobs.values()) + to_come

    def prompts_s(self, now_s: float, step_time: StepTime) -> float:
        """Return the seconds of the prefills that its jobs still need."""
        if not self.new_share:
            return 0.0
        number = self.num_to_come(now_s) + sum(not job.generated_tokens for job in self.jobs)
        num_tokens = self._input_tokens / self.num_arrived
        num_new = self.new_share * num_tokens
        return number * float(step_time.prompt_s(num_tokens - num_new, num_new))

    @property
    def longest_tokens(self) -> float:
        """The tokens that its longest answer still needs."""
        return max((left.mean for left in self.jobs.values()), default=0.0)

    def needed(self, now_s: float, token_s: float, step_time: StepTime) -> tuple[int, float]:
        """Return how many of its jobs have to run from now on, and how many tokens each of them has
        time for.

        Enough jobs have to run to end the answers before the last half of the longest one, and to
        include every job that has no time to wait. The time of prefills is subtracted first. A late
        batch gets its whole time again.

        token_s: seconds from token to token of a running job.
        """
        left_s, spare_s = self.done_s - now_s, _SPARE * self.part.done_in_s
        is_late = left_s <= 0
        if is_late:
            left_s = self.part.done_in_s
        elif left_s > spare_s:
            left_s -= spare_s
        left_s -= _BETWEEN * self.prompts_s(now_s, step_time)
        steps = max(left_s, token_s) / token_s
        full_steps = max(1.0, steps - _TAIL * self.longest_tokens)
        number = int(self.left_tokens(now_s) / full_steps) + is_late
        latest = sum(left.most >= steps for left in self.jobs.values())
        return min(len(self.jobs), max(number, latest)), steps

    def open(self, now_s: float, running: set[Job]) -> int:
        """Return how many of its jobs may run while other requests are served. Jobs that have begun
        may, and some more every _TOGETHER_S seconds."""
        num_begun = self.num_ended + sum(_has_begun(job, running) for job in self.jobs)
        if now_s >= self._opened_s + _TOGETHER_S:
            share = _TOGETHER_S / (_STARTS * self.part.done_in_s)
            num_jobs = self.num_arrived + self.num_to_come(now_s)
            self._num_open = num_begun + math.ceil(share * num_jobs)
            self._opened_s = now_s
        return max(self._num_open, num_begun) - self.num_ended

    def order(self, number: int, steps: float, running: set[Job]) -> list[Job]:
        """Return the jobs that may run, at most `number`: first the num_due that go first.

        These are jobs that have no time to wait, then running ones, ones that have run, and the
        longest answers. Of the others, the shortest start first: if one is longer than predicted,
        that soon shows.
        """

        def due(job: Job) -> tuple[bool, bool, bool, float, int]:
            most, has_run = self.jobs[job].most, job.generated_tokens > 0
            return most < steps, job not in running, not has_run, -most, job.arrival

        def beside(job: Job) -> tuple[bool, float, int]:
            return not _has_begun(job, running), self.jobs[job].most, job.arrival

        first = sorted(self.jobs, key=due)[: self.num_due]
        return [*first, *sorted(self.jobs.keys() - {*first}, key=beside)][:number]

    def left_in_s(self, now_s: float, token_s: float, step_time: StepTime) -> float:
        """Return the predicted time until it is done, if as many run as lately."""
        most = len(self.jobs) + self.num_to_come(now_s)
        together = max(1.0, min(max(self.num_running, self.num_due), most))
        num_tokens = max(self.left_tokens(now_s) / together, self.longest_tokens)
        return self.prompts_s(now_s, step_time) + token_s * num_tokens

    def least_s(self, server: ServerFacts, now_s: float, other_tokens: float = 0.0) -> float:
        """Return the time that it takes at least, if the server serves only it and other_tokens."""
        mean_tokens = self._known_tokens / self.num_arrived
        kv_tokens = self._input_tokens / self.num_arrived + mean_tokens / 2
        number = min(server.max_running_requests, server.kv_pool_tokens // max(1, int(kv_tokens)))
        if not other_tokens:
            number = min(number, len(self.jobs) + self.num_to_come(now_s))
        number = max(1, number)
        step_time = server.step_time
        tokens = self.left_tokens(now_s) + other_tokens
        steps_s = tokens / number * step_time.decode_s(number, int(number * kv_tokens))
        longest_s = mean_tokens * step_time.decode_s(1, int(kv_tokens))
        return max(self.prompts_s(now_s, step_time) + steps_s, longest_s)
