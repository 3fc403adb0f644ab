"""Shadow mode (--sage-shadow FILE): under one of SGLang's own policies, predictions are made, held
against what comes, and used by nobody; and step times are learned.

FILE has a JSON line per request, for `sage-sched whatif`: arrival_s (seconds since 1970),
input_tokens, output_tokens, max_new_tokens (0: none was named), is_cut (the answer was ended by its
cap or its client), ttlt_s, and prediction, as LengthDistribution.as_fields has it (null if it came
too late). It holds no prompts. A failure here costs the record, not the request.

Not to be confused with sage_sched/shadow.py, which is about packages.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from patches.engine_types import Batch, Scheduler
from patches.hook import AFTER, AROUND, BEFORE, Hooks
from patches.http.asked import asked_of
from patches.http.predict import is_internal, prompt_text, request_hooks, scope_of, state_of
from patches.http.settings_route import add_refusing_route
from patches.http_types import Awaited, BatchOutput, Request, ServerArgs, TokenizerManager
from patches.scheduler.calibration import Calibration, ends_with_launch, tokens_of
from predictor_store.service.client import PredictorClient
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.steps import ServerFacts

logger = logging.getLogger(__name__)

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# SGLang's cap if sampling_params name none (sglang/srt/sampling/sampling_params.py).
_DEFAULT_CAP_TOKENS = 128


def refuse_place(file: str) -> None:
    """Raises OSError if no record can be written there. Creates nothing."""
    path = Path(file).expanduser()
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(f"--sage-shadow is {file}, and {path.parent} is no folder to write to")
    if path.is_symlink() or (path.exists() and not (path.is_file() and os.access(path, os.W_OK))):
        raise OSError(f"--sage-shadow is {file}, which is no file of this user's own")


class ShadowRecord:
    """Appends to the file, which only its owner can read. It ends, with one log line, if the disk
    takes no more."""

    def __init__(self, file: str) -> None:
        """Raises OSError unless it is a file of this user's own, and no link."""
        path = Path(file).expanduser()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o600)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            self.close()
            raise OSError(f"{path} is no file of this user's own")
        os.fchmod(self._fd, 0o600)
        self._path = path
        self._num_written = 0
        self._num_lost = 0

    def add(
        self,
        *,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        cap_tokens: int,
        is_cut: bool,
        ttlt_s: float,
        prediction: LengthDistribution | None,
    ) -> None:
        """Never raises OSError."""
        said = None if prediction is None else prediction.as_fields()
        if said is not None:
            said["weights"] = [float(f"{weight:.8g}") for weight in said["weights"]]
        line = {
            "arrival_s": round(arrival_s, 6),
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "max_new_tokens": cap_tokens,
            "is_cut": is_cut,
            "ttlt_s": round(ttlt_s, 6),
            "prediction": said,
        }
        self._write(json.dumps(line).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        if self._fd is None:
            self._num_lost += 1
            return
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError("the disk is full")
            self._num_written += 1
        except OSError as error:
            self._num_lost += 1
            self.close()
            logger.error("nothing more is written to %s: %s", self._path, error)

    def stats(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "file": str(self._path),
            "num_written": self._num_written,
            "num_lost": self._num_lost,
            "is_stopped": self._fd is None,
        }

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Shadow:
    """`TokenizerManager.sage` of a server in shadow mode."""

    record: ShadowRecord
    client: PredictorClient


_failed: set[str] = set()


def _harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but its errors are logged once, and it returns None then."""

    @wraps(hook)
    def guarded(*args: Any, **kw: Any) -> Any:
        try:
            return hook(*args, **kw)
        except Exception:
            if hook.__name__ not in _failed:
                _failed.add(hook.__name__)
                logger.exception("--sage-shadow could not do its part; requests go on without")

    return guarded


shadow_http_hooks = Hooks(request_hooks)


@shadow_http_hooks.at(f"{_MANAGER}.__init__", AFTER, "server_args")
def _after_init(
    result: None, self: TokenizerManager, server_args: ServerArgs, *args: Any, **kw: Any
) -> None:
    model = server_args.served_model_name or server_args.model_path
    client = PredictorClient(server_args._sage_config, model)
    self.sage = Shadow(ShadowRecord(server_args._sage_shadow), client)
    client.start()  # the schedulers are loading the model meanwhile
    add_refusing_route(
        "this server is in shadow mode (--sage-shadow): SGLang's own "
        f"{server_args.schedule_policy} orders requests, and nothing can be switched. One that is "
        "started with --schedule-policy sage instead can be, to SGLang's own order too: "
        "sage-sched set schedule_policy=fcfs"
    )


@shadow_http_hooks.at(f"{_MANAGER}._batch_tokenize_and_process", BEFORE, "batch_size", "obj")
@_harmless
def _before_tokenize_batch(
    self: TokenizerManager, batch_size: int, obj: Request, *args: Any, **kw: Any
) -> None:
    for i in range(batch_size):
        _before_tokenize_one(self, obj[i])


@shadow_http_hooks.at(f"{_MANAGER}._tokenize_one_request", BEFORE, "obj")
@_harmless
def _before_tokenize_one(self: TokenizerManager, obj: Request, *args: Any, **kw: Any) -> None:
    """Ask for the prediction; nobody waits for it."""
    if not isinstance(obj, GenerateReqInput) or state_of(obj).is_started:
        return
    state = state_of(obj)
    state.is_started = True
    text = None if is_internal(self, obj) else prompt_text(self, obj)
    if text is not None:
        state.came_s = time.time()
        predicted = self.sage.client.predict(text, scope_of(obj), asked_of(obj, state.asked))
        state.prediction = asyncio.ensure_future(predicted)


@shadow_http_hooks.at(f"{_MANAGER}._handle_batch_output", BEFORE, "recv_obj")
@_harmless
def _before_output(self: TokenizerManager, recv_obj: BatchOutput, *args: Any, **kw: Any) -> None:
    now_s = time.time()
    for i, (rid, reason) in enumerate(zip(recv_obj.rids, recv_obj.finished_reasons, strict=True)):
        found = self.rid_to_state.get(rid)
        output_tokens = int(recv_obj.completion_tokens[i])
        if reason is None or found is None or output_tokens < 1:
            continue
        state = state_of(found.obj)
        if state.prediction is None:
            continue
        has_come = state.prediction.done() and not state.prediction.cancelled()
        prediction = state.prediction.result() if has_come else None
        is_cut, input_tokens = reason["type"] != "stop", int(recv_obj.prompt_tokens[i])
        if prediction is not None and prediction.handle is not None:
            self.sage.client.finished(prediction.handle, input_tokens, output_tokens, is_cut)
        self.sage.record.add(
            arrival_s=state.came_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cap_tokens=_cap_tokens(found.obj),
            is_cut=is_cut,
            ttlt_s=now_s - state.came_s,
            prediction=None if prediction is None else prediction.distribution,
        )


def _cap_tokens(obj: Request) -> int:
    sampling = obj.sampling_params
    named = sampling.get("max_new_tokens", _DEFAULT_CAP_TOKENS) if isinstance(sampling, dict) else 0
    return int(named or 0)


@shadow_http_hooks.at(f"{_MANAGER}.get_internal_state", AROUND)
async def _around_internal_state(original: Awaited, self: TokenizerManager) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = await original(self)
    for state in states:
        said = {"predictor": self.sage.client.stats(), "shadow": self.sage.record.stats()}
        state["sage"] = state.get("sage", {}) | said
    return states


def shadow_scheduler_hooks(config: SageConfig) -> Hooks:
    """For a scheduler, whose steps are measured."""
    hooks = Hooks()
    # Made once the process's one scheduler knows its model.
    learned: list[Calibration] = []

    @hooks.at(f"{_SCHEDULER}.init_schedule_policy", AFTER)
    @_harmless
    def after_init_policy(result: None, self: Scheduler) -> None:
        learned.append(Calibration.of(self, config))

    @_harmless
    def launched(scheduler: Scheduler, batch: Batch) -> list[float] | None:
        return learned[0].steps.launched(batch, scheduler._sched_idled)

    @_harmless
    def ended(scheduler: Scheduler, work: list[float] | None, result: Any) -> None:
        learned[0].steps.ended(work, num_tokens=tokens_of(result))
        step_time, num_slots = learned[0].step_time, scheduler.max_running_requests
        facts = ServerFacts(scheduler.max_total_num_tokens, num_slots, step_time, 0.0)
        if (news := learned[0].news(facts)) is not None:
            learned[0].told(news)

    @hooks.at(f"{_SCHEDULER}.run_batch", AROUND, "batch")
    def around_run_batch(
        original: Any, self: Scheduler, batch: Batch, *args: Any, **kw: Any
    ) -> Any:
        work = launched(self, batch)
        result = original(self, batch, *args, **kw)
        if ends_with_launch(self.device):
            ended(self, work, result)
        else:
            result.sage_work = work
        return result

    @hooks.at(f"{_SCHEDULER}.process_batch_result", AFTER, "batch", "result")
    def after_batch_result(
        done: None, self: Scheduler, batch: Batch, result: Any, *args: Any, **kw: Any
    ) -> None:
        if not ends_with_launch(self.device):
            ended(self, getattr(result, "sage_work", None), result)

    @hooks.at(f"{_SCHEDULER}.get_internal_state", AFTER, "recv_req")
    @_harmless
    def after_internal_state(result: Any, self: Scheduler, recv_req: object) -> None:
        result.internal_state["sage"] = {"step_time": learned[0].stats()}

    return hooks
