"""What is known of jobs with a promise, and how much a second of serving each is worth (ProServe,
section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from sage_sched.distribution import Floats, LengthDistribution
from sage_sched.job import Job
from sage_sched.slo.promise import Promise
from sage_sched.steps import Cost

NEVER = -1
# Densities rest on powers of two, so that each holds for a while. A pass computes at most so many.
_NUM_LOOKED_AT = 16
_MOST_DOUBLINGS = 64
# The worth of an answer is computed anew every so many tokens.
_INTERVAL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Worth:
    """The worth of an answer whose length has a known distribution.

    The paper's density looks at the next token alone. But whoever prefills a prompt also buys its
    answer. With S(k) the share of answers of at least k tokens, serving one up to its K-th token
    is worth and costs, on average,

        V(K) = sum over k <= K of w(k) S(k) [token k is on time]
        C(K) = prefill + sum over k <= K of S(k) * what its k-th token takes

    and its density is the best V(K) / C(K), for K among the lengths of the distribution. A late
    answer catches up with its `first`-th token; those before it are worth nothing. Seconds are
    those of a cost model, which charges for memory and slots too.

    lengths: ascending. before: the length before each. survival: the share of answers that are
    longer than that. costs_s: the cost of an answer of each length. steps_s: of which since the
    length before. All of shape (lengths,).
    """

    lengths: Floats
    before: Floats
    survival: Floats
    costs_s: Floats
    steps_s: Floats

    @classmethod
    def of(
        cls, known: LengthDistribution, cost: Cost, input_tokens: int, cached_tokens: int = 0
    ) -> Self:
        """known: with its tail, up to the cap."""
        lengths = known.lengths.astype(np.float64)
        weights = np.asarray(known.weights, np.float64)
        survival = np.cumsum(weights[::-1])[::-1]
        costs_s = np.asarray(cost(input_tokens, lengths, cached_tokens), np.float64)
        before = np.concatenate(([0.0], lengths[:-1]))
        return cls(lengths, before, survival, costs_s, np.diff(costs_s, prepend=0.0))

    def density(
        self, first_weight: float, next_weight: float, age: int, first: int, spent_s: float
    ) -> float:
        """The density at this age (0: nothing is prefilled).

        first: the number of the next token that is on time (1: the first token); all later ones are
            on time too. spent_s: the costs that have been spent already.
        """
        at = int(np.searchsorted(self.lengths, age, side="right"))
        if at == len(self.lengths):
            return 0.0
        # Shares of all answers, not of those that have come so far: the factor cancels out.
        survival, lengths = self.survival[at:], self.lengths[at:]
        before, costs_s = self.before[at:].copy(), self.steps_s[at:].copy()
        before[0], costs_s[0] = age, self.costs_s[at] - spent_s
        # How many tokens between one length and the next are on time.
        late = first - 1
        on_time = np.maximum(lengths, late) - np.maximum(before, late)
        gains = next_weight * survival * on_time
        if first <= 1 and age == 0:
            gains[0] += first_weight - next_weight
        spent = np.maximum((costs_s * survival).cumsum(), 1e-12)
        return float((gains.cumsum() / spent).max())


@dataclass(slots=True)
class Promised:
    """What is known of a job with a promise; its Job.memo.

    worth: of its answer. exec_s: seconds that its next token takes by the model of step times.
    due_s: when that token is due, by SchedulerView.now_s. looked_at: what density rests on, see
    densities_of_answers. is_urgent, key: of the last pass.
    """

    promise: Promise
    worth: Worth
    exec_s: float
    due_s: float = math.inf
    density: float = 0.0
    looked_at: int = NEVER
    is_urgent: bool = False
    key: float = 0.0


Pair = tuple[Job, Promised]


def promised_of(job: Job) -> Promised | None:
    """None if the job has no promise, or is not ranked."""
    return job.memo if isinstance(job.memo, Promised) else None


def promised_among(jobs: Iterable[Job]) -> list[Pair]:
    return [(job, job.memo) for job in jobs if isinstance(job.memo, Promised)]


def densities_of_answers(
    jobs: list[Pair], num_running: int, missing_s: Floats, catching_s: Floats, cost: Cost
) -> None:
    """Ours: the worth of the answer (Worth). Computed anew for a job if its age has
    changed, or how many tokens it takes to catch up; both count roughly, the latter in powers of
    two (0: it is in time).

    jobs: of which the first num_running run. missing_s: by how much the next token of each will be
    late. catching_s: by how much each step brings a late one closer. cost: of an answer by its
    length.
    """
    to_catch_up = np.minimum(np.maximum(missing_s, 0.0) / catching_s, 1e9)
    tokens = np.where(missing_s > 0, to_catch_up + 1, 0.5)
    late = (np.floor(np.log2(tokens)) + 1).astype(np.int64)
    ages = np.zeros(len(jobs), np.int64)
    ages[:num_running] = [
        job.generated_tokens // _INTERVAL_TOKENS + 1 for job, _ in jobs[:num_running]
    ]
    looked_at = late + _MOST_DOUBLINGS * ages
    before = np.array([p.looked_at for _, p in jobs])
    num_left = _NUM_LOOKED_AT
    for at in np.flatnonzero(looked_at != before).tolist():
        job, p = jobs[at]
        if num_left > 0 or p.looked_at == NEVER:
            num_left -= 1
            p.looked_at = int(looked_at[at])
            p.density = _density(job, p, int(late[at]), cost)


def _density(job: Job, p: Promised, doublings: int, cost: Cost) -> float:
    age = job.generated_tokens
    first = age + 1 + (0 if doublings == 0 else int(1.5 * 2.0 ** (doublings - 1)))
    if first > job.max_new_tokens:
        return 0.0
    spent_s = cost(job.input_tokens, age, job.cached_input_tokens) if age else 0.0
    promise = p.promise
    return p.worth.density(promise.first_weight, promise.next_weight, age, first, spent_s)
