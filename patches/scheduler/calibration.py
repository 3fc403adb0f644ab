"""The step times that a server goes by: configured, or learned on rank 0 and told to all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from patches.messages import StepTimes
from patches.scheduler.step_meter import StepMeter
from patches.scheduler.step_time_file import StepTimeFile
from sage_sched.config import StepTimeConfig, in_ms
from sage_sched.steps.learner import MEMORY_STEPS, StepLearner, is_worth_telling
from sage_sched.steps.pace import Pace
from sage_sched.steps.time import ServerFacts, StepTime

logger = logging.getLogger(__name__)


class Calibration:
    """One scheduler's. Rank 0's alone learns; all go by what it told them.

    step_time: what the ranks go by. source: where it is from: configured, or else shipped, kept by
    an earlier server of this kind, or learned. steps: to be told
    of each. beta: by how much the latest take longer than step_time says.
    """

    def __init__(self, configured: StepTimeConfig | None, file: StepTimeFile | None) -> None:
        """file: where what is learned is kept, if it is."""
        self.step_time = (configured or StepTimeConfig()).step_time()
        self.source = "shipped" if configured is None else "configured"
        self._learner = StepLearner(self.step_time)
        self.beta = Pace()
        self.steps = StepMeter(self)
        self._file = file
        self._learns = configured is None
        self._was_read = False
        self._news: StepTimes | None = None
        self._num_steps_told = 0

    def add(self, work: Sequence[float], seconds: float) -> None:
        """A step, for StepMeter: what it had to do (step_fit.COLUMNS), and how long it took."""
        self._learner.add(work, seconds)
        coefficients = astuple(self.step_time)
        self.beta.add(seconds, sum(n * s for n, s in zip(work, coefficients, strict=True)))

    def news(self, server: ServerFacts) -> StepTimes | None:
        """On rank 0, in every pass: what to tell all ranks. It is said until it has come back, as
        SGLang may skip a broadcast."""
        if self._learns and self._news is None:
            try:
                self._learn(server)
            except Exception:
                self._learns = False
                logger.exception("step times are no longer learned; they stay as they are")
        return self._news

    def _learn(self, server: ServerFacts) -> None:
        if self._file is not None and not self._was_read:
            self._was_read = True
            if (kept := self._file.read()) is not None:
                self._learner.step_time = kept
                self._tell(kept, "kept")
        elif self._learner.is_due:
            self._learner.learn()
            learned = self._learner.step_time
            # What was told stands for as many steps as it rests on: to rank a thousand requests
            # anew takes as long as a step or two.
            rested_on = min(self._num_steps_told, MEMORY_STEPS)
            is_due = self._learner.num_steps - self._num_steps_told >= rested_on
            if is_due and is_worth_telling(learned, self.step_time, server):
                self._tell(learned, "learned")
                if self._file is not None:
                    self._file.write(learned)

    def _tell(self, step_time: StepTime, source: str) -> None:
        self._news = StepTimes(seconds=[*astuple(step_time)], source=source)

    def told(self, news: StepTimes) -> None:
        """On all ranks, between the same two passes: go by these."""
        self.step_time = StepTime(*news.seconds)
        self.source = news.source
        self.beta.reset()
        self._news = None
        self._num_steps_told = self._learner.num_steps
        logger.info("step times are %s now: %s", self.source, self.step_time)

    def pace(self) -> float:
        """How many of the step times' seconds go by in one. What is learned is in real ones."""
        return 1.0 if self._learns else 1 / self._learner.factor(self.step_time)

    def stats(self) -> dict[str, Any]:
        """For /server_info. latest: what rank 0 has learned, which may not be worth telling.
        error: see StepLearner."""
        return {
            "source": self.source,
            **in_ms(self.step_time),
            "latest": in_ms(self._learner.step_time),
            "num_steps": self._learner.num_steps,
            "error": self._learner.error,
            "beta": self.beta.factor,
        }
