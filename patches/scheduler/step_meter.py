"""Measures the steps of a scheduler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from patches.engine_types import Batch, Req, Scheduler
from patches.hook import harmless

# Tokens per speculative step are averaged over this many of the latest steps.
_MEAN_STEPS = 256


def ends_with_launch(device: str) -> bool:
    """Whether a step ends with its launch. An accelerator's step ends when its result is
    processed."""
    return device == "cpu"


class StepMeter:
    """Measures steps. A step lasts from the end of the previous step to its own end.

    So all work of a busy server between two steps counts, and under overlap nothing counts twice.
    An accelerator with events reports when a step ended. The host sees results late, and by amounts
    that differ between prefills and decode steps.

    The step after a move is not reported. On an accelerator the step after idle time is not
    reported either, because nothing hides its launch; on a CPU it counts from its launch.
    """

    def __init__(self, report: Callable[[Sequence[float], float], None], device: str) -> None:
        """report: takes the work of a step (sage_sched.step_learner.COLUMNS) and its seconds."""
        self._report = report
        self._device = device
        self._module = torch.get_device_module(device)
        self._has_events = device != "cpu" and hasattr(self._module, "Event")
        self._since_s: float | None = None
        self._since: Any = None  # the event that ended the previous step
        # Steps whose results are here, until the device says how long they took.
        self._processed = deque[tuple[Any, Any, list[float]]]()
        self._is_interrupted = False
        self._num_decodes = 0
        self._mean_tokens = 0.0
        # The requests of the last decode step, and their KV.
        self._decoding: list[Req] = []
        self._kv_tokens = 0

    def timed(self, scheduler: Scheduler, batch: Batch, run: Callable[[], Any]) -> Any:
        """Run Scheduler.run_batch and measure it."""
        work = self.launched(batch, scheduler._sched_idled)
        result = run()
        if ends_with_launch(self._device):
            self.ended(work, tokens_of(result))
        else:
            result.sage_work = work
            result.sage_end = self._end_event(scheduler) if self._has_events else None
        return result

    @harmless
    def _end_event(self, scheduler: Scheduler) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(scheduler.forward_stream if scheduler.enable_overlap else None)
        return event

    def processed(self, result: Any) -> None:
        """Measure a step, whose result has been processed."""
        if ends_with_launch(self._device):
            return
        work = getattr(result, "sage_work", None)
        if not self._has_events:
            self.ended(work, tokens_of(result))
        else:
            self._ended_by_device(work, tokens_of(result), getattr(result, "sage_end", None))

    @harmless
    def launched(self, batch: Batch, after_idle: bool) -> list[float] | None:
        """Return the work of a batch that is about to run, for ended(); None if it is not to be
        reported."""
        is_interrupted, self._is_interrupted = self._is_interrupted, False
        if after_idle and ends_with_launch(self._device):
            self._since_s = time.perf_counter()
        elif after_idle or is_interrupted:
            self._decoding = []
            return None
        return self._work(batch)

    def _work(self, batch: Batch) -> list[float] | None:
        """Return sage_sched.step_learner.COLUMNS of a ScheduleBatch
        (sglang/srt/managers/schedule_batch.py). A mixed batch reads the weights once, so it counts
        as no decode step."""
        mode = batch.forward_mode
        if mode.is_idle() or mode.is_prebuilt():
            return None
        num_decoding = len(batch.decoding_reqs or [])
        if not mode.is_extend_without_speculative() or num_decoding == len(batch.reqs):
            return [0, 0, 0, 0, 1, len(batch.reqs), self._kv_tokens_of(batch.reqs)]
        if num_decoding:
            self._decoding = []
        num_prefills = len(batch.reqs) - num_decoding
        cached, new = batch.prefix_lens[:num_prefills], batch.extend_lens[:num_prefills]
        pairs = sum(n * (c + n / 2) for c, n in zip(cached, new, strict=True))
        decoding_kv_tokens = sum(batch.prefix_lens[num_prefills:])
        return [1, num_prefills, sum(new), pairs, 0, num_decoding, decoding_kv_tokens]

    def _kv_tokens_of(self, reqs: Sequence[Req]) -> int:
        """Return the KV of the requests that decode. Without drafts it grows by a token each, and
        is not summed again until one comes or goes."""
        if self._mean_tokens == 1.0 and reqs == self._decoding:
            self._kv_tokens += len(reqs)
        else:
            self._decoding = [*reqs]
            self._kv_tokens = sum(req.kv.kv_committed_len for req in reqs)
        return self._kv_tokens

    @harmless
    def ended(self, work: list[float] | None, num_tokens: float = 1.0) -> None:
        """Report a step that has ended now. num_tokens: see tokens_of."""
        now_s = time.perf_counter()
        if work is not None and self._since_s is not None:
            self._report(self._by_tokens(work, num_tokens), now_s - self._since_s)
        self._since_s = now_s

    @harmless
    def _ended_by_device(self, work: list[float] | None, num_tokens: float, end: Any) -> None:
        """Report the steps that the device says have ended. This does not wait for it."""
        since, self._since = self._since, end
        if work is not None and since is not None and end is not None:
            self._processed.append((since, end, self._by_tokens(work, num_tokens)))
        while self._processed and self._processed[0][1].query():
            since, end, work = self._processed.popleft()
            self._report(work, since.elapsed_time(end) / 1e3)

    def _by_tokens(self, work: list[float], num_tokens: float) -> list[float]:
        """Return the work of a step whose requests got this many tokens each.

        Step times are for one token per request, so a speculative step counts as several steps.
        Their number is the recent mean of tokens per step, because a mean of ratios would be
        biased.
        """
        if not work[4]:
            return work
        self._num_decodes += 1
        self._mean_tokens += (num_tokens - self._mean_tokens) / min(self._num_decodes, _MEAN_STEPS)
        return [*work[:4], *(self._mean_tokens * n for n in work[4:])]

    def interrupted(self) -> None:
        """Do not report the current step, because something else takes time during it."""
        self._since_s, self._is_interrupted = None, True


def tokens_of(result: Any) -> float:
    """Return the mean number of tokens that a step gave each request: 1 without speculative
    decoding (GenerationBatchResult, managers/utils.py)."""
    accepted = getattr(result, "accept_lens", None)
    return 1.0 if accepted is None or not len(accepted) else float(accepted.float().mean())
