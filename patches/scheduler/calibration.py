"""Keeps the step times of a server: configured, or learned on rank 0 and broadcast to all ranks."""

from __future__ import annotations

import logging
from dataclasses import astuple
from typing import Any

from patches.engine_types import Batch, Scheduler
from patches.listener import Listener
from patches.messages import StepTimes
from patches.scheduler.step_meter import StepMeter
from patches.scheduler.step_time_file import StepTimeFile, kind_of
from sage_sched.app.config import SageConfig, StepTimeConfig, in_ms
from sage_sched.step_learner import MEMORY_STEPS, StepLearner, is_worth_reporting
from sage_sched.steps import ServerFacts, StepTime

logger = logging.getLogger(__name__)

# A server keeps step times once they are learned from at least this many steps. The first ones can
# be atypical.
_LEAST_KEPT_STEPS = 1024


class Calibration(Listener):
    """The step times of one scheduler. Only rank 0 learns; all ranks use its broadcasts.

    step_time: the step times in force.
    source: their origin: configured, shipped, kept by an earlier server of this kind, or learned.
    steps: measures the steps.
    """

    def __init__(
        self,
        configured: StepTimeConfig | None,
        file: StepTimeFile | None,
        kv_pool_tokens: int,
        max_running_requests: int,
        device: str,
    ) -> None:
        """file: keeps learned step times; None to keep nothing."""
        self.step_time = (configured or StepTimeConfig()).step_time()
        self.source = "shipped" if configured is None else "configured"
        self._learner = StepLearner(self.step_time)
        self.steps = StepMeter(self._learner.add, device)
        self._file = file
        self._learns = configured is None
        self._size = (kv_pool_tokens, max_running_requests)
        self._was_read, self._is_kept = False, True
        self._update: StepTimes | None = None
        self._num_steps_published = 0

    @classmethod
    def of(cls, scheduler: Scheduler, config: SageConfig) -> Calibration:
        """Make the calibration of a scheduler. Learned step times are kept if the store is on
        disk."""
        file = StepTimeFile(kind_of(scheduler)) if config.store.on_disk else None
        size = (scheduler.max_total_num_tokens, scheduler.max_running_requests)
        return cls(config.step_time, file, *size, scheduler.device)

    @property
    def are_own(self) -> bool:
        """Whether the step times are this server's. Kept ones may be another host's."""
        return self.source in ("configured", "learned")

    def stepped(self, batch: Batch, result: Any) -> None:
        """Measure a step, whose result has been processed."""
        if result is not None:
            self.steps.processed(result)

    def polled(self) -> StepTimes | None:
        """Return new step times for all ranks, or None."""
        if self._learns and self._update is None:
            try:
                self._learn()
            except Exception:
                self._learns = False
                logger.exception("step times are no longer learned; they stay as they are")
        return self._update

    def _learn(self) -> None:
        if self._file is not None and not self._was_read:
            self._was_read = True
            if (kept := self._file.read()) is not None:
                self._learner.step_time = kept
                self._publish(kept, "kept")
        elif self._learner.is_due:
            self._learner.learn()
            learned = self._learner.step_time
            # Step times stay in force for the number of steps they were learned from, because
            # ranking a thousand requests again takes as long as a step or two.
            rested_on = min(self._num_steps_published, MEMORY_STEPS)
            is_due = self._learner.num_steps - self._num_steps_published >= rested_on
            server = ServerFacts(*self._size, self.step_time, 0.0)
            if is_due and is_worth_reporting(learned, self.step_time, server):
                self._publish(learned, "learned")
                self._is_kept = False
            elif self.source in ("shipped", "kept"):  # they are right; refusing may begin
                self._publish(self.step_time, "learned")
            has_learned = self._learner.num_steps >= _LEAST_KEPT_STEPS
            if self._file is not None and has_learned and not self._is_kept:
                self._is_kept = True
                self._file.write(learned)

    def _publish(self, step_time: StepTime, source: str) -> None:
        self._update = StepTimes(seconds=[*astuple(step_time)], source=source)

    def updated(self, update: StepTimes) -> None:
        """Use these step times from now on. All ranks call this between the same two passes."""
        self.step_time = StepTime(*update.seconds)
        self.source = update.source
        self._update = None
        self._num_steps_published = self._learner.num_steps
        logger.info("step times are %s now: %s", self.source, self.step_time)

    def pace(self) -> float:
        """Return how many seconds pass by the step times in one real second; 1 if they are
        learned."""
        return 1.0 if self._learns else 1 / self._learner.factor(self.step_time)

    def stats(self) -> dict[str, Any]:
        """Return the step times and their errors.

        latest: the step times that rank 0 has learned, which may not be worth a broadcast yet.
        error, errors: see StepLearner. errors is for the step times in force.
        """
        return {
            "step_time": {
                "source": self.source,
                **in_ms(self.step_time),
                "latest": in_ms(self._learner.step_time),
                "num_steps": self._learner.num_steps,
                "error": self._learner.error,
                "errors": self._learner.errors(self.step_time),
            }
        }
