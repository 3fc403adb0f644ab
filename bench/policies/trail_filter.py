"""Implements TRAIL's filter for the remaining length of an answer (Shahout et al., ICLR 2025,
section 3.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sage_sched.distribution import Floats, Refined
from sage_sched.job import Job

# The minimum probability, so that a wrong but certain score can be corrected.
_LEAST = 1e-12


def moved_down(q: Floats, width_tokens: float, num_tokens: int = 1) -> Floats:
    """Return the bins of q, shape (..., bins), after num_tokens: T q.

    T[i, i] = 1 - 1 / width, T[i, i + 1] = 1 / width: lengths are spread evenly within a bin, so at
    each token one in width moves to the bin below. (The matrix printed in appendix A has 1 / width
    below the diagonal, which would move them up; section 3.1 is right.) In the first bin, one in
    width has ended. Given that it has not, the rest is scaled to sum to 1.
    """
    for _ in range(num_tokens):
        down = np.zeros_like(q)
        down[..., :-1] = q[..., 1:]
        q = q * (1 - 1 / width_tokens) + down / width_tokens
    moved: Floats = q / q.sum(axis=-1, keepdims=True)
    return moved


def filtered(q: Floats, p: Floats, width_tokens: float, num_tokens: int = 1) -> Floats:
    """Filter by the text of section 3.1: q(t) ~ (T q(t-1)) * p(t); shapes (..., bins).

    In step 2 as printed, the prior moves on without the scores, so all evidence but the latest is
    lost.
    """
    return _normalized(moved_down(q, width_tokens, num_tokens) * p)


def _normalized(q: Floats) -> Floats:
    q = np.maximum(q, _LEAST)
    normalized: Floats = q / q.sum(axis=-1, keepdims=True)
    return normalized


@dataclass(slots=True, eq=False)
class _Evidence:
    age_tokens: int
    q: Floats


class TrailFilter:
    """The filter of one server (sage_sched.probe.refining.Refiner). It uses the scores alone, at
    every token.

    The paper's filter is not fitted, and does not use the prompt's prediction.
    """

    def __init__(self, width_tokens: float) -> None:
        """width_tokens: the width of a bin."""
        self._width_tokens = width_tokens

    def refine(self, jobs: Sequence[Job], ages: Sequence[int], log_p: Floats) -> list[Job]:
        p = np.exp(log_p)
        # If a job has two scores, they are applied in order of age. Scores with the same gap (more
        # than a token if a message was late) are applied together.
        alike: dict[tuple[int, int], list[int]] = {}
        turns, last = Counter[Job](), dict[Job, int]()
        for row, (job, age_tokens) in enumerate(zip(jobs, ages, strict=True)):
            evidence = job.evidence
            if job not in last:
                last[job] = evidence.age_tokens if isinstance(evidence, _Evidence) else -1
            if age_tokens > last[job]:
                gap = age_tokens - last[job] if last[job] >= 0 else 0
                alike.setdefault((turns[job], gap), []).append(row)
                last[job] = age_tokens
                turns[job] += 1
        for (_, gap), rows in sorted(alike.items()):
            self._step(jobs, ages, rows, gap, p[rows])
        middles = np.asarray(self._width_tokens * (np.arange(p.shape[1]) + 0.5), np.float64)
        for job in turns:
            evidence = job.evidence
            assert isinstance(evidence, _Evidence)
            job.revise(Refined(evidence.age_tokens, evidence.age_tokens + middles, evidence.q))
        return [*turns]

    def _step(
        self, jobs: Sequence[Job], ages: Sequence[int], rows: Sequence[int], gap: int, p: Floats
    ) -> None:
        """Apply the scores p to these rows.

        gap: tokens since the last scores; 0 if these are the first.
        """
        if gap:
            known = [
                evidence.q for r in rows if isinstance(evidence := jobs[r].evidence, _Evidence)
            ]
            p = filtered(np.array(known), p, self._width_tokens, gap)
        else:
            p = _normalized(p)
        for row, found in zip(rows, p, strict=True):
            jobs[row].evidence = _Evidence(ages[row], found)
