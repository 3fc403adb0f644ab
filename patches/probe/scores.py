"""Turns rank 0's readings of hidden states into scores that all ranks use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from patches.engine_types import Batch, Req
from patches.failures import Failures
from patches.listener import Listener
from patches.messages import Scores
from patches.probe.recorder import Recorder
from predictor_store.probe.file import ProbeFile
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.probe import Refiner, from_steps, in_steps
from sage_sched.scheduler import Scheduler

logger = logging.getLogger(__name__)

# The maximum number of undelivered scores, which are kept because SGLang may skip broadcasts.
_MAX_PENDING = 65_536
# A message costs every rank a broadcast, and numpy's calls cost the same for few rows as for many.
# With more running requests than this, scores are sent only every few passes, some of them late.
MANY_RUNNING = 128
PASSES_A_MESSAGE = 4


def why_no_probe(policy: Policy, probing: Probing | None) -> str:
    """Return why a policy cannot use the loaded probe; "" if it can, or needs none."""
    if policy.traits.refiner is None:
        return ""
    if probing is None or probing.probe is None:
        return "none was loaded at the start (probe.file)"
    if probing.is_stale:
        return "the model's weights were updated since its probe was trained"
    return ""


class Probing(Listener):
    """The probe of one scheduler. Only rank 0 reads hidden states."""

    def __init__(
        self,
        core: Scheduler,
        probe: ProbeFile | None,
        recorder: Recorder | None,
        failures: Failures,
    ) -> None:
        self.probe = probe
        self._failures = failures
        self.is_stale = False
        self.recorder = recorder
        self._number = 0
        self._arrivals: list[int] = []
        self._ages: list[int] = []
        self._steps: list[Any] = []
        self._num_not_finite = 0
        self._reads = True
        self._num_running = 0
        self._num_held_back = 0
        self._refiner: Refiner | None = None
        # Weak references, so that this keeps no request alive.
        self._jobs: WeakValueDictionary[int, Job] = WeakValueDictionary()
        self._core = core
        self.switched("", ())

    def switched(self, name: str, unfinished: Sequence[Req]) -> None:
        """Refine jobs for another policy. why_no_probe must have returned "" for it."""
        refiner, self._refiner = self._core.policy.traits.refiner, None
        if refiner is not None and self.probe is not None:
            self._refiner = refiner(self.probe.edges)
        self._why_stopped, self._num_scores = "", 0
        self._jobs.clear()
        self._drop(len(self._steps))
        for req in unfinished:
            self.arrived(req)

    def arrived(self, req: Req) -> None:
        job = req.sage.job
        if self._refiner is not None:
            self._jobs[job.arrival] = job

    def weights_updated(self) -> None:
        """Stop using the probe, which was trained on other weights. From now on, predictions
        come from the prompt alone."""
        self.is_stale = True
        if self._refiner is not None:
            logger.warning("the model's weights were updated: its probe is not used any more")
            self._why_stopped = "the model's weights were updated"
            refined = [job for _, job in sorted(self._jobs.items()) if job.refined is not None]
            for job in refined:
                job.revise(None)
            self._core.refined(refined)

    def read(self, batch: Batch, commits: Sequence[Any], logits: Any, states: Any) -> None:
        """Read the committed tokens of a step. Never raises, because an error would end the server.

        commits: sglang's CommittedTokens or None, by request.
        logits: (rows, bins); None without a probe.
        states: (rows, layers, hidden); None if not recorded.
        """
        try:
            if self._reads and self._refiner is not None and logits is not None:
                self._score(batch, commits, logits)
            if self.recorder is not None and states is not None:
                self.recorder.read(batch, commits, states)
        except Exception:
            # Scores may be on their way to the ranks, so this rank still takes them in.
            logger.exception("hidden states are no longer read")
            self._reads, self.recorder = False, None

    def _score(self, batch: Batch, commits: Sequence[Any], logits: Any) -> None:
        self._num_running = len(batch.reqs)
        rows, arrivals, ages = [], [], []
        for row, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True)):
            if commit is not None:
                if not np.isfinite(logits[row]).all():
                    self._num_not_finite += 1
                    continue
                rows.append(row)
                arrivals.append(req.sage.job.arrival)
                ages.append(commit.output_index)
        if rows:
            self._number += len(rows)
            self._arrivals += arrivals
            self._ages += ages
            self._steps.extend(in_steps(logits[rows].astype(np.float64)))
            self._drop(max(0, len(self._steps) - _MAX_PENDING))

    def _drop(self, number: int) -> None:
        del self._arrivals[:number], self._ages[:number], self._steps[:number]

    def polled(self) -> Scores | None:
        """Return new scores for all ranks, or None."""
        if self._refiner is None or not self._steps or self._holds_back():
            return None
        return Scores(
            number=self._number,
            arrivals=self._arrivals.copy(),
            ages=self._ages.copy(),
            steps=b"".join(row.tobytes() for row in self._steps),
        )

    def _holds_back(self) -> bool:
        """Whether this pass sends no message."""
        self._num_held_back += 1
        held = self._num_running > MANY_RUNNING and self._num_held_back < PASSES_A_MESSAGE
        if not held:
            self._num_held_back = 0
        return held

    def scored(self, scores: Scores) -> None:
        """Take in rank 0's scores, on all ranks."""
        try:
            self._take_in(scores)
        except Exception:
            self._failures.count("take in scores")

    def _take_in(self, scores: Scores) -> None:
        if self._refiner is None:
            return
        # Rank 0 need not repeat delivered scores.
        self._drop(len(self._steps) - (self._number - scores.number) if self._steps else 0)
        if not scores.arrivals or self._why_stopped:
            return
        log_p = from_steps(np.frombuffer(scores.steps, np.int8).reshape(len(scores.arrivals), -1))
        jobs = [self._jobs.get(arrival) for arrival in scores.arrivals]
        rows = [row for row, job in enumerate(jobs) if job is not None]
        if rows:
            known = [job for job in jobs if job is not None]
            refined = self._refiner.refine(known, [scores.ages[row] for row in rows], log_p[rows])
            self._num_scores += len(refined)
            self._core.refined(refined)

    def ended(self, req: Req, was_aborted: bool) -> None:
        job = req.sage.job
        if was_aborted:  # its length says nothing
            return
        self._jobs.pop(job.arrival, None)
        if self.recorder is not None:
            self.recorder.ended(req, job.generated_tokens)

    def stats(self) -> dict[str, Any]:
        about = {"num_scores": self._num_scores, "stopped": self._why_stopped}
        return {
            "probe": {
                **({} if self._refiner is None else about),
                "num_not_finite": self._num_not_finite,
                "recorder": None if self.recorder is None else self.recorder.stats(),
            }
        }
