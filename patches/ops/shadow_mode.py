"""A policy of SGLang's own with --sage-shadow: predictions are made, held against what comes, and
used by nobody; and step times are learned. What goes wrong here costs the record, not the request.

Not to be confused with sage_sched/shadow.py, which is about packages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from patches.engine_types import Batch, Scheduler
from patches.hook import AFTER, AROUND, BEFORE, Hook
from patches.http.asked import asked_of
from patches.http.request_prediction import (
    is_internal,
    prompt_text,
    request_hooks,
    scope_of,
    state_of,
)
from patches.http.settings_route import add_refusing_route
from patches.http_types import Awaited, BatchOutput, Request, ServerArgs, TokenizerManager
from patches.ops.shadow_record import ShadowRecord
from patches.scheduler.calibration import Calibration, ends_with_launch
from predictor_store.service.client import PredictorClient
from sage_sched.config import SageConfig
from sage_sched.steps.time import ServerFacts

logger = logging.getLogger(__name__)

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# SGLang's, where sampling_params name none (sglang/srt/sampling/sampling_params.py).
_DEFAULT_CAP_TOKENS = 128

_failed: set[str] = set()


def _harmless(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, whose errors are logged once and reach nobody."""

    @wraps(hook)
    def guarded(*args: Any, **kw: Any) -> None:
        try:
            hook(*args, **kw)
        except Exception:
            if hook.__name__ not in _failed:
                _failed.add(hook.__name__)
                logger.exception("--sage-shadow could not do its part; requests go on without")

    return guarded


def http_hooks() -> list[Hook]:
    """For the HTTP process."""
    return [
        Hook(f"{_MANAGER}.__init__", AFTER, _after_init, ("server_args",)),
        Hook(f"{_MANAGER}._tokenize_one_request", BEFORE, _before_tokenize_one, ("obj",)),
        Hook(
            f"{_MANAGER}._batch_tokenize_and_process",
            BEFORE,
            _before_tokenize_batch,
            ("batch_size", "obj"),
        ),
        Hook(f"{_MANAGER}._handle_batch_output", BEFORE, _before_output, ("recv_obj",)),
        Hook(f"{_MANAGER}.get_internal_state", AROUND, _around_internal_state, ()),
        *request_hooks(),
    ]


def _after_init(
    result: None, self: TokenizerManager, server_args: ServerArgs, *args: Any, **kw: Any
) -> None:
    model = server_args.served_model_name or server_args.model_path
    self.sage_record = ShadowRecord(server_args._sage_shadow)
    self.sage_client = PredictorClient(server_args._sage_config, model)
    self.sage_client.start()  # the schedulers are loading the model meanwhile
    add_refusing_route(
        "this server is in shadow mode (--sage-shadow): SGLang's own "
        f"{server_args.schedule_policy} orders requests, and nothing can be switched. One that is "
        "started with --schedule-policy sage instead can be, to SGLang's own order too: "
        "sage-sched set schedule_policy=fcfs"
    )


@_harmless
def _before_tokenize_batch(
    self: TokenizerManager, batch_size: int, obj: Request, *args: Any, **kw: Any
) -> None:
    for i in range(batch_size):
        _before_tokenize_one(self, obj[i])


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
        predicted = self.sage_client.predict(text, scope_of(obj), asked_of(obj, state.asked))
        state.prediction = asyncio.ensure_future(predicted)


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
            self.sage_client.finished(prediction.handle, input_tokens, output_tokens, is_cut)
        self.sage_record.add(
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


async def _around_internal_state(original: Awaited, self: TokenizerManager) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = await original(self)
    for state in states:
        said = {"predictor": self.sage_client.stats(), "shadow": self.sage_record.stats()}
        state["sage"] = state.get("sage", {}) | said
    return states


def scheduler_hooks(config: SageConfig) -> list[Hook]:
    """For a scheduler, whose steps are measured."""
    # Made once the process's one scheduler knows its model.
    steps: Calibration | None = None

    @_harmless
    def after_init_policy(result: None, self: Scheduler) -> None:
        nonlocal steps
        steps = Calibration.of(self, config)

    def around_run_batch(
        original: Any, self: Scheduler, batch: Batch, *args: Any, **kw: Any
    ) -> Any:
        work: list[list[float] | None] = []
        launched(self, batch, work)
        result = original(self, batch, *args, **kw)
        if ends_with_launch(self.device):
            ended(self, work)
        elif work:
            result.sage_work = work
        return result

    def after_batch_result(
        done: None, self: Scheduler, batch: Batch, result: Any, *args: Any, **kw: Any
    ) -> None:
        if not ends_with_launch(self.device):
            ended(self, getattr(result, "sage_work", []))

    @_harmless
    def launched(scheduler: Scheduler, batch: Batch, work: list[list[float] | None]) -> None:
        assert steps is not None
        work.append(steps.steps.launched(batch, scheduler._sched_idled))

    @_harmless
    def ended(scheduler: Scheduler, work: list[list[float] | None]) -> None:
        assert steps is not None
        steps.steps.ended(work[0] if work else None)
        facts = ServerFacts(
            scheduler.max_total_num_tokens, scheduler.max_running_requests, steps.step_time, 0.0
        )
        if (news := steps.news(facts)) is not None:
            steps.told(news)

    @_harmless
    def after_internal_state(result: Any, self: Scheduler, recv_req: object) -> None:
        assert steps is not None
        result.internal_state["sage"] = {"step_time": steps.stats()}

    def of_scheduler(name: str, kind: Any, hook: Any, *parameters: str) -> Hook:
        return Hook(f"{_SCHEDULER}.{name}", kind, hook, parameters)

    return [
        of_scheduler("init_schedule_policy", AFTER, after_init_policy),
        of_scheduler("run_batch", AROUND, around_run_batch, "batch"),
        of_scheduler("process_batch_result", AFTER, after_batch_result, "batch", "result"),
        of_scheduler("get_internal_state", AFTER, after_internal_state, "recv_req"),
    ]
