"""The step times that a server goes by: configured, or learned on rank 0 and told to all ranks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from patches.engine_types import Batch, Scheduler
from patches.hook import harmless
from patches.messages import StepTimes
from predictor_store.cached_file import cache_folder, read_own, replace_own
from sage_sched.app.config import SageConfig, StepTimeConfig, in_ms
from sage_sched.fields import parse_section
from sage_sched.step_learner import MEMORY_STEPS, StepLearner, is_worth_telling
from sage_sched.steps import ServerFacts, StepTime

logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 65_536
# Of so many steps, the latest, the tokens that a speculative one gives are averaged.
_MEAN_STEPS = 256


def ends_with_launch(device: str) -> bool:
    """Whether a step is over at its launch; an accelerator's is once its result is processed."""
    return device == "cpu"


class StepMeter:
    """Measures steps. A step takes from the end of the previous step to its own end: whatever a
    busy server does between two steps counts, and under overlap nothing counts twice. After idle
    time a step counts from its launch. A step that something else came into is not told."""

    def __init__(self, tell: Callable[[Sequence[float], float], None]) -> None:
        """tell: takes the work of a step (sage_sched.step_learner.COLUMNS) and its seconds."""
        self._tell = tell
        self._since_s: float | None = None
        self._num_decodes = 0
        self._mean_tokens = 0.0

    def timed(self, scheduler: Scheduler, batch: Batch, run: Callable[[], Any]) -> Any:
        """Scheduler.run_batch, measured."""
        work = self.launched(batch, scheduler._sched_idled)
        result = run()
        if ends_with_launch(scheduler.device):
            self.ended(work, tokens_of(result))
        else:
            result.sage_work = work
        return result

    def processed(self, scheduler: Scheduler, result: Any) -> None:
        """A step's result has been processed."""
        if not ends_with_launch(scheduler.device):
            self.ended(getattr(result, "sage_work", None), tokens_of(result))

    @harmless
    def launched(self, batch: Batch, after_idle: bool) -> list[float] | None:
        """A batch is about to run: its work, to be given to ended(); None if it is no step."""
        if after_idle:
            self._since_s = time.perf_counter()
        return _work(batch)

    @harmless
    def ended(self, work: list[float] | None, num_tokens: float = 1.0) -> None:
        """A step is over. num_tokens: see tokens_of."""
        now_s = time.perf_counter()
        if work is not None and self._since_s is not None:
            self._tell(self._by_tokens(work, num_tokens), now_s - self._since_s)
        self._since_s = now_s

    def _by_tokens(self, work: list[float], num_tokens: float) -> list[float]:
        """The work of a step whose requests got so many tokens. Step times are those of one token
        of each request, so a speculative step counts as several: as many as steps gave lately, as
        a mean of ratios would be off by the spread."""
        if not work[4]:
            return work
        self._num_decodes += 1
        self._mean_tokens += (num_tokens - self._mean_tokens) / min(self._num_decodes, _MEAN_STEPS)
        return [*work[:4], *(self._mean_tokens * n for n in work[4:])]

    def interrupted(self) -> None:
        """Something that is no part of a step takes time."""
        self._since_s = None


def _work(batch: Batch) -> list[float] | None:
    """sage_sched.step_learner.COLUMNS of a ScheduleBatch (sglang/srt/managers/schedule_batch.py). A
    mixed batch reads the weights once, so it counts as no decode step."""
    mode = batch.forward_mode
    if mode.is_idle() or mode.is_prebuilt():
        return None
    num_decoding = len(batch.decoding_reqs or [])
    if not mode.is_extend_without_speculative() or num_decoding == len(batch.reqs):
        kv_tokens = sum(req.kv.kv_committed_len for req in batch.reqs)
        return [0, 0, 0, 0, 1, len(batch.reqs), kv_tokens]
    num_prefills = len(batch.reqs) - num_decoding
    cached, new = batch.prefix_lens[:num_prefills], batch.extend_lens[:num_prefills]
    pairs = sum(n * (c + n / 2) for c, n in zip(cached, new, strict=True))
    decoding_kv_tokens = sum(batch.prefix_lens[num_prefills:])
    return [1, num_prefills, sum(new), pairs, 0, num_decoding, decoding_kv_tokens]


def tokens_of(result: Any) -> float:
    """How many tokens each request got from a step, on average. It is 1 but for speculative
    decoding (GenerationBatchResult, managers/utils.py)."""
    accepted = getattr(result, "accept_lens", None)
    return 1.0 if accepted is None or not len(accepted) else float(accepted.float().mean())


class StepTimeFile:
    """Keeps learned step times for the next server of the same kind, in the cache folder. Only its
    owner can read it, and no link is followed. A file that is no use costs one log line."""

    def __init__(self, server: Mapping[str, str]) -> None:
        """server: what step times depend on, see kind_of."""
        self._server = dict(server)
        self._can_be_written = True
        name = hashlib.sha256(json.dumps(self._server, sort_keys=True).encode()).hexdigest()[:16]
        self._name = f"step-times-{name}.json"

    @property
    def path(self) -> Path:
        """Raises OSError if the user has no cache folder."""
        return cache_folder() / self._name

    def read(self) -> StepTime | None:
        """What an earlier server learned; None if there is nothing of use."""
        try:
            written = json.loads(read_own(self.path, _MAX_FILE_BYTES))
            if written["server"] != self._server:
                raise ValueError("it is of another server")
            section = written["step_time"]
            parsed: StepTimeConfig = parse_section(StepTimeConfig, "step_time", section)
            return parsed.step_time()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("step times are learned anew, as %s is no use: %r", self._name, error)
            return None

    def write(self, step_time: StepTime) -> None:
        """Keep them. Never raises."""
        if not self._can_be_written:
            return
        written = {"server": self._server, "step_time": in_ms(step_time)}
        try:
            replace_own(self.path, (json.dumps(written, indent=2) + "\n").encode())
        except OSError as error:
            self._can_be_written = False
            logger.warning(
                "step times are not kept, as %s cannot be written: %s", self._name, error
            )


def kind_of(scheduler: Scheduler) -> dict[str, str]:
    """What a server's step times depend on: its model and the hardware."""
    args: Any = scheduler.server_args
    device = torch.get_device_module(scheduler.device)
    hardware = (
        device.get_device_name()
        if hasattr(device, "get_device_name")
        else f"{os.cpu_count()} {os.uname().machine} cores"
    )
    names = (
        "model_path", "quantization", "kv_cache_dtype", "tp_size", "ep_size", "enable_dp_attention",
        "enable_lora", "speculative_algorithm", "speculative_num_draft_tokens",
    )  # fmt: skip
    about = {name: str(getattr(args, name)) for name in names}
    return about | {"dtype": str(scheduler.model_config.dtype), "hardware": hardware}


class Calibration:
    """The step times of one scheduler. Only rank 0 learns; all ranks go by what it tells them.
    step_time: what the ranks go by. source: where it comes from: configured, shipped, kept by an
    earlier server of this kind, or learned. steps: measures the steps."""

    def __init__(self, configured: StepTimeConfig | None, file: StepTimeFile | None) -> None:
        """file: keeps what is learned; None to keep nothing."""
        self.step_time = (configured or StepTimeConfig()).step_time()
        self.source = "shipped" if configured is None else "configured"
        self._learner = StepLearner(self.step_time)
        self.steps = StepMeter(self._learner.add)
        self._file = file
        self._learns = configured is None
        self._was_read = False
        self._news: StepTimes | None = None
        self._num_steps_told = 0

    @classmethod
    def of(cls, scheduler: Scheduler, config: SageConfig) -> Calibration:
        """What is learned is kept if the store is on disk."""
        file = StepTimeFile(kind_of(scheduler)) if config.store.on_disk else None
        return cls(config.step_time, file)

    def news(self, server: ServerFacts) -> StepTimes | None:
        """On rank 0, in every pass: what to tell all ranks. It is repeated until it comes back,
        because SGLang may skip a broadcast."""
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
                self._say(kept, "kept")
        elif self._learner.is_due:
            self._learner.learn()
            learned = self._learner.step_time
            # Step times stay in force for as many steps as they were learned from: ranking a
            # thousand requests again takes as long as a step or two.
            rested_on = min(self._num_steps_told, MEMORY_STEPS)
            is_due = self._learner.num_steps - self._num_steps_told >= rested_on
            if is_due and is_worth_telling(learned, self.step_time, server):
                self._say(learned, "learned")
                if self._file is not None:
                    self._file.write(learned)

    def _say(self, step_time: StepTime, source: str) -> None:
        self._news = StepTimes(seconds=[*astuple(step_time)], source=source)

    def told(self, news: StepTimes) -> None:
        """On all ranks, between the same two passes: go by these from now on."""
        self.step_time = StepTime(*news.seconds)
        self.source = news.source
        self._news = None
        self._num_steps_told = self._learner.num_steps
        logger.info("step times are %s now: %s", self.source, self.step_time)

    def pace(self) -> float:
        """Seconds of the step times per real second: 1 if they are learned."""
        return 1.0 if self._learns else 1 / self._learner.factor(self.step_time)

    def stats(self) -> dict[str, Any]:
        """For /server_info. latest: what rank 0 has learned, which may not be worth telling yet.
        error: see StepLearner. errors: of the step times in force, see there."""
        return {
            "source": self.source,
            **in_ms(self.step_time),
            "latest": in_ms(self._learner.step_time),
            "num_steps": self._learner.num_steps,
            "error": self._learner.error,
            "errors": self._learner.errors(self.step_time),
        }
