"""Step times that follow a server while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np

from sage_sched.cost import cost_named
from sage_sched.steps.fit import COLUMNS, factor, fit
from sage_sched.steps.time import ServerFacts, StepTime

# Of so many steps, the latest, step times are learned, anew after so many more.
MEMORY_STEPS, INTERVAL_STEPS = 2048, 256
# Prompts and answers of such lengths stand for all.
_TYPICAL_TOKENS = (32, 512, 8192)
# Costs that change by a smaller share have not changed.
_WORTH_TELLING = 0.1


class StepLearner:
    """Step times from the latest steps. What these do not tell stays as it was learned or given,
    times one factor; see step_fit.fit.

    step_time: by now. num_steps: seen in all. error: by how much the latest steps, before they were
    learned from, took more or less than foreseen, as a share of what was foreseen, half of them
    less; None before anything was learned.
    """

    def __init__(self, start: StepTime) -> None:
        self.step_time = start
        self.num_steps = 0
        self.error: float | None = None
        self._steps = np.zeros((MEMORY_STEPS, len(COLUMNS) + 1))
        self._num_learned = 0

    def add(self, work: Sequence[float], seconds: float) -> None:
        """A step: what it had to do, see step_fit.COLUMNS, and how long it took, if above 0."""
        if seconds > 0:
            self._steps[self.num_steps % MEMORY_STEPS] = (*work, seconds)
            self.num_steps += 1

    @property
    def is_due(self) -> bool:
        """Whether enough has been seen since learn() to learn anew."""
        return self.num_steps - self._num_learned >= INTERVAL_STEPS

    def learn(self) -> None:
        """Learn from the latest steps, of which there is one."""
        steps = self._steps[: self.num_steps]
        if self._num_learned:
            self.error = self._error()
        self.step_time = fit(steps[:, :-1], steps[:, -1], self.step_time)
        self._num_learned = self.num_steps

    def factor(self, step_time: StepTime) -> float:
        """By how much most of the latest steps took longer than step_time says; 1 before there are
        any."""
        steps = self._steps[: self.num_steps]
        return factor(steps[:, :-1], steps[:, -1], step_time)

    def _error(self) -> float:
        unlearned = np.arange(self._num_learned, self.num_steps)[-MEMORY_STEPS:] % MEMORY_STEPS
        steps = self._steps[unlearned]
        expected_s = steps[:, :-1] @ np.array(astuple(self.step_time))
        return float(np.median(np.abs(steps[:, -1] / np.maximum(expected_s, 1e-12) - 1)))


def is_worth_telling(new: StepTime, old: StepTime, server: ServerFacts) -> bool:
    """Whether costs have changed by more than a tenth: most of them in seconds, or that of a
    typical request beside what all have changed by."""
    most_tokens = server.kv_pool_tokens // 4
    lengths = [min(tokens, most_tokens) for tokens in _TYPICAL_TOKENS]
    before, after = (
        cost_named("measured", replace(server, step_time=step_time)) for step_time in (old, new)
    )
    changes = np.log([after(i, o) / before(i, o) for i in lengths for o in lengths])
    common = np.median(changes)
    limit = np.log1p(_WORTH_TELLING)
    return bool(abs(common) > limit or np.abs(changes - common).max() > limit)
