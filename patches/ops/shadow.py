"""Runs shadow mode (--sage-shadow FILE): makes predictions under one of SGLang's own policies,
compares them with the answers, and uses them for nothing. Shadow mode learns step times too.

FILE has a JSON line per request, for `sage-sched whatif`:

    arrival_s: seconds since 1970.
    input_tokens, output_tokens, ttlt_s.
    max_new_tokens: 0 if none was named.
    is_cut: whether the cap or the client ended the answer.
    prediction: as in LengthDistribution.as_fields; null if it came too late.

FILE holds no prompts. A failure here loses a record, never a request.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import BatchStrOutput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager as Manager
from sglang.srt.server_args import ServerArgs

from patches.engine_types import Batch, Scheduler
from patches.hook import AFTER, AROUND, BEFORE, Awaited, Hooks, harmless
from patches.http.answers import was_stopped
from patches.http.asked import asked_of, eos_ids_of, scope_of
from patches.http.incoming import chat_hooks, incoming, new_parts, prompt_text
from patches.json_lines import JsonLines
from patches.listener import Listeners
from patches.scheduler.calibration import Calibration
from patches.scheduler.gap_meter import GapMeter
from predictor_store.service.client import PredictorClient
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# SGLang's cap if sampling_params name none (sglang/srt/sampling/sampling_params.py).
_DEFAULT_CAP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Shadow:
    """Our state of a server in shadow mode, kept as `TokenizerManager.sage`."""

    record: JsonLines
    client: PredictorClient


shadow_http_hooks = Hooks(chat_hooks)


@shadow_http_hooks.at(f"{_MANAGER}.__init__", AFTER, "server_args")
def _after_init(_: None, self: Manager, server_args: ServerArgs, *args: Any, **kw: Any) -> None:
    model = server_args.served_model_name or server_args.model_path
    client = PredictorClient(server_args._sage_config, model)
    self.sage = Shadow(JsonLines(Path(server_args._sage_shadow)), client)
    client.start()  # the schedulers are loading the model meanwhile


@shadow_http_hooks.at(f"{_MANAGER}._init_req_state", BEFORE, "obj", "request")
@harmless
def _before_init_state(
    self: Manager, obj: GenerateReqInput, request: Any = None, *args: Any, **kw: Any
) -> None:
    """Ask for predictions. No request waits for them."""
    if not isinstance(obj, GenerateReqInput):
        return
    for part in new_parts(self, obj, request):
        incoming(obj).came_s = incoming(part).came_s = time.time()
        if (text := prompt_text(self, part)) is not None:
            scope, asked = scope_of(part, eos_ids_of(self)).name, incoming(part).asked
            predicted = self.sage.client.predict(text, scope, asked_of(part, asked))
            incoming(part).prediction = asyncio.ensure_future(predicted)


@shadow_http_hooks.at(f"{_MANAGER}._handle_batch_output", BEFORE, "recv_obj")
@harmless
def _before_output(self: Manager, recv_obj: BatchStrOutput, *args: Any, **kw: Any) -> None:
    for i, (rid, reason) in enumerate(zip(recv_obj.rids, recv_obj.finished_reasons, strict=True)):
        found = self.rid_to_state.get(rid)
        output_tokens = int(recv_obj.completion_tokens[i])
        if reason is None or found is None or output_tokens < 1:
            continue
        kept = incoming(found.obj)
        if kept.prediction is None:
            continue
        has_come = kept.prediction.done() and not kept.prediction.cancelled()
        prediction = kept.prediction.result() if has_come else None
        is_cut, input_tokens = reason["type"] != "stop", int(recv_obj.prompt_tokens[i])
        if prediction is not None and prediction.handle is not None:
            stopped = was_stopped(self, found.obj, reason)
            self.sage.client.finished(
                prediction.handle, input_tokens, output_tokens, is_cut, stopped
            )
        line = {
            "arrival_s": kept.came_s,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
            "max_new_tokens": _cap_tokens(found.obj),
            "is_cut": is_cut,
            "ttlt_s": time.time() - kept.came_s,
            "prediction": fields_of(None if prediction is None else prediction.distribution),
        }
        self.sage.record.add(line)


def _cap_tokens(obj: GenerateReqInput) -> int:
    sampling = obj.sampling_params
    named = sampling.get("max_new_tokens", _DEFAULT_CAP_TOKENS) if isinstance(sampling, dict) else 0
    return int(named or 0)


def fields_of(lengths: LengthDistribution | None) -> dict[str, Any] | None:
    """Return a prediction as it is written, with short numbers: most of a line is weights."""
    if lengths is None:
        return None
    fields = lengths.as_fields()
    return fields | {"weights": [float(f"{weight:.8g}") for weight in fields["weights"]]}


@shadow_http_hooks.at(f"{_MANAGER}.get_internal_state", AROUND)
async def _around_internal_state(original: Awaited, self: Manager) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = await original(self)
    for state in states:
        said = {"predictor": self.sage.client.stats(), "shadow": self.sage.record.stats()}
        state["sage"] = state.get("sage", {}) | said
    return states


def shadow_scheduler_hooks(config: SageConfig) -> Hooks:
    """Return the hooks of a scheduler in shadow mode, which measure its steps."""
    hooks = Hooks()
    # Filled once the process's only scheduler knows its model.
    learned: list[Calibration] = []
    listeners = Listeners([GapMeter()])

    @hooks.at(f"{_SCHEDULER}.init_schedule_policy", AFTER)
    @harmless
    def after_init_policy(result: None, self: Scheduler) -> None:
        learned.append(Calibration.of(self, config))
        listeners.append(learned[0])

    @hooks.at(f"{_SCHEDULER}.run_batch", AROUND, "batch")
    def around_run(original: Any, self: Scheduler, batch: Batch, *args: Any, **kw: Any) -> Any:
        run = partial(original, self, batch, *args, **kw)
        return learned[0].steps.timed(self, batch, run) if learned else run()

    @hooks.at(f"{_SCHEDULER}.process_batch_result", AFTER, "batch", "result")
    @harmless
    def after_step(_: None, self: Scheduler, batch: Batch, result: Any, *args: Any) -> None:
        listeners.stepped(batch, result)
        for req in batch.reqs:
            if req.finished_reason is not None:
                listeners.ended(req, False)
        for update in listeners.polled():
            learned[0].updated(update)

    @hooks.at(f"{_SCHEDULER}.get_internal_state", AFTER, "recv_req")
    @harmless
    def after_internal_state(result: Any, self: Scheduler, recv_req: object) -> None:
        result.internal_state["sage"] = listeners.stats()

    return hooks
