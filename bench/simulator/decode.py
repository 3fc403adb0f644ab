"""Models the running batch, which takes many decode steps at once, in closed form."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from bench.simulator.request import Progress
from sage_sched.job import Job
from sage_sched.steps import StepTime

_EVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Pace:
    """The seconds of a batch's next step, and the growth with each further one."""

    first_s: float
    growth_s: float = 0.0

    def seconds(self, num_steps: int) -> float:
        """Return the time of num_steps."""
        return num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) / 2)

    def steps_to_pass(self, seconds: float) -> int:
        """Return the fewest steps, at least 1, that take this many seconds."""
        half_growth = self.growth_s / 2
        linear = self.first_s - half_growth
        if not seconds < math.inf or self.first_s <= 0:
            return _EVER
        root = linear + math.sqrt(max(0.0, linear * linear + 4 * half_growth * seconds))
        return max(1, math.ceil(2 * seconds / root * (1 - 1e-12)))

    def steps_within(self, seconds: float) -> int:
        """Return the number of steps from the next one on that are shorter than this."""
        short_s = seconds - self.first_s
        if short_s <= 0:
            return 0
        return math.ceil(short_s / self.growth_s) if self.growth_s else _EVER


class DecodeBatch:
    """Requests that get a token each in every step.

    A leap of n steps costs the same for all n, because the batch keeps only values that steps do
    not change. These are, for each request, the step at which it finishes, its age less the step
    counter, and the step, modulo the page size, at which it needs a page.

    context_tokens: of the next step, including the tokens that it writes.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._members: dict[Progress, None] = {}
        self._progress_of: dict[Job, Progress] = {}
        self._finishes: list[tuple[int, int, Progress]] = []
        self._num_joined = 0
        self._page_due = [0] * page_size
        self.context_tokens = 0
        self.step = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Progress]:
        """Iterate in order of joining."""
        return iter(self._members)

    def join(self, progress: Progress) -> None:
        """Add a request whose prefill is done, or which is back on the device. At least one token
        is still to come."""
        progress.age_offset = progress.generated_tokens - self.step
        progress.served_offset = progress.job.served_tokens - self.step
        progress.finish_step = progress.request.output_tokens - progress.age_offset
        self._members[progress] = None
        self._progress_of[progress.job] = progress
        self.context_tokens += progress.fill_tokens
        self._page_due[(self.step - progress.kv_tokens) % self._page_size] += 1
        self._num_joined += 1
        heapq.heappush(self._finishes, (progress.finish_step, self._num_joined, progress))

    def leave(self, progress: Progress) -> None:
        """Remove a finished, retracted or preempted request, and make its age current."""
        self.sync(progress)
        del self._members[progress]
        del self._progress_of[progress.job]
        self.context_tokens -= progress.fill_tokens
        self._page_due[(self.step - progress.kv_tokens) % self._page_size] -= 1
        progress.finish_step = -1

    @property
    def jobs(self) -> Collection[Job]:
        return self._progress_of.keys()

    def of(self, job: Job) -> Progress:
        """Return the member with this job."""
        return self._progress_of[job]

    def sync(self, progress: Progress) -> None:
        """Make a member's age and served tokens current."""
        progress.job.served_tokens = progress.served_offset + self.step
        progress.job.grow(progress.age_offset + self.step)

    def pages_needed(self, num_steps: int) -> int:
        """Return the pages that num_steps take."""
        cycles, rest = divmod(num_steps, self._page_size)
        due = (self._page_due[(self.step + i) % self._page_size] for i in range(rest))
        return cycles * len(self) + sum(due)

    def steps_that_fit(self, num_pages: int) -> int:
        """Return the most steps that these pages allow."""
        cycles, left = divmod(num_pages, len(self))
        steps = cycles * self._page_size
        while left >= (due := self._page_due[(self.step + steps) % self._page_size]):
            left -= due
            steps += 1
        return steps

    def steps_to_finish(self) -> int:
        """Return the steps until the first member has its last token."""
        while self._finishes[0][2].finish_step != self._finishes[0][0]:
            heapq.heappop(self._finishes)  # it has left, or left and joined again
        return self._finishes[0][0] - self.step

    def steps_to_refresh(self, interval_tokens: int) -> int:
        """Return the steps until the age of some member reaches a multiple of interval_tokens."""
        oldest = max((p.age_offset + self.step) % interval_tokens for p in self._members)
        return interval_tokens - oldest

    def finished(self) -> list[Progress]:
        """Remove and return the members that have their last token."""
        gone = []
        while self._members and self.steps_to_finish() == 0:
            progress = heapq.heappop(self._finishes)[2]
            self.leave(progress)
            gone.append(progress)
        return gone

    def leap(self, num_steps: int) -> None:
        """Give all members num_steps tokens."""
        self.step += num_steps
        self.context_tokens += num_steps * len(self)

    def pace(self, step_time: StepTime) -> Pace:
        """Return the device's pace."""
        first_s = step_time.decode_s(len(self), self.context_tokens)
        return Pace(first_s, step_time.decode_kv_token_s * len(self))


def num_on_time(
    num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float
) -> int:
    """Return the number of decode steps whose token is on time. Each step takes growth_s longer
    than the one before.

    due_s: the deadline of the first token, from now; each further one has tpot_s more.
    """
    if num_steps == 1:
        return int(first_s <= due_s)
    if first_s + growth_s * (num_steps - 1) <= tpot_s:  # each token has more time than the last
        last = num_steps - 1
        if first_s <= due_s:
            return num_steps
        if num_steps * (first_s + growth_s * last / 2) > due_s + last * tpot_s:
            return 0
    before = np.arange(num_steps, dtype=np.float64)
    number = before + 1
    came_s = number * first_s + growth_s * (number * before / 2)
    dues_s = np.full(num_steps, due_s)
    dues_s[1:] += before[1:] * tpot_s
    return int((came_s <= dues_s).sum())
