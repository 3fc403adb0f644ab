"""The hooks of an HTTP process, in the order in which a request meets them."""

from __future__ import annotations

import os
import time
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, BatchStrOutput, GenerateReqInput
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput as Tokenized
from sglang.srt.managers.tokenizer_manager import TokenizerManager as Manager
from sglang.srt.server_args import ServerArgs

from patches.carrier import short_id
from patches.compat import APP, APP_VARIABLE
from patches.hook import AFTER, AROUND, BEFORE, Awaited, Hooks
from patches.http.answers import learn
from patches.http.incoming import chat_hooks
from patches.http.intake import begin, encode, is_encoded, open_body, receive
from patches.http.keep_open import note_stream
from patches.http.refused import note_refusal, note_request
from patches.http.state import HttpState, http_state
from patches.messages import EarlyAbort
from predictor_store.service.supervisor import SharedWorker

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

# These hooks do nothing for a manager whose --schedule-policy is not ours.
http_hooks = Hooks(chat_hooks)


@http_hooks.at(f"{_MANAGER}.__init__", AFTER, "server_args")
def _after_init(_: None, self: Manager, server_args: ServerArgs, *args: Any, **kw: Any) -> None:
    if hasattr(server_args, "_sage_config"):
        self.sage = HttpState(self, server_args)


# A request comes in (patches/http/intake.py).


@http_hooks.at(f"{_MANAGER}.generate_request", BEFORE, "obj", "request")
def _before_generate(self: Manager, obj: GenerateReqInput, request: Any = None) -> None:
    # All routes pass here, before SGLang uses anything that a client sent.
    if http_state(self) is not None and isinstance(obj, GenerateReqInput):
        open_body(obj, request)
        note_request(obj, request)
        note_stream(obj, request)


@http_hooks.at(f"{_MANAGER}._init_req_state", BEFORE, "obj", "request")
def _before_init_state(
    self: Manager, obj: GenerateReqInput, request: Any = None, *args: Any, **kw: Any
) -> None:
    # At this point SGLang has split a batch into requests, but has tokenized none. It tokenizes
    # them one by one; asking here for all predictions lets the worker make them together.
    if (ours := http_state(self)) is not None and isinstance(obj, GenerateReqInput):
        ours.metrics.start()
        receive(self, ours, obj, request)


@http_hooks.at(f"{_MANAGER}._validate_and_resolve_lora", BEFORE, "obj")
def _before_validate(self: Manager, obj: GenerateReqInput) -> None:
    # SGLang calls this as soon as no pause or weight update holds the request back.
    if http_state(self) is not None and isinstance(obj, GenerateReqInput):
        begin(obj)


@http_hooks.at(f"{_MANAGER}._tokenize_one_request", AROUND, "obj")
async def _around_tokenize_one(
    original: Awaited, self: Manager, obj: GenerateReqInput, *args: Any, **kw: Any
) -> Tokenized:
    tokenized: Tokenized = await original(self, obj, *args, **kw)
    if http_state(self) is not None and isinstance(obj, GenerateReqInput):
        await encode(self, obj, tokenized)
    return tokenized


@http_hooks.at(f"{_MANAGER}._batch_tokenize_and_process", AROUND, "batch_size", "obj")
async def _around_tokenize_batch(
    original: Awaited, self: Manager, batch_size: int, obj: GenerateReqInput
) -> list[Tokenized]:
    batch: list[Tokenized] = await original(self, batch_size, obj)
    if http_state(self) is not None and isinstance(obj, GenerateReqInput):
        for i, tokenized in enumerate(batch):
            if not is_encoded(tokenized):  # SGLang has not called _tokenize_one_request for it
                await encode(self, obj[i], tokenized)
    return batch


# A client aborts its request.


@http_hooks.at(f"{_MANAGER}.abort_request", BEFORE, "rid", "abort_all")
def _before_abort(self: Manager, rid: str = "", abort_all: bool = False) -> None:
    if http_state(self) is not None:
        tell_early_abort(self, rid, abort_all)


def tell_early_abort(manager: Manager, rid: str, abort_all: bool) -> None:
    """Announce an abort to the schedulers if it may reach them before its request does
    (patches/scheduler/early_aborts.py)."""
    if (state := manager.rid_to_state.get(rid)) is not None:
        is_early = not state.dispatched
    else:  # the request may be in another process
        is_early = rid != "" and manager.server_args.tokenizer_worker_num > 1
    if abort_all or is_early:
        begins = "" if abort_all else short_id(rid)
        manager._dispatch_to_scheduler(EarlyAbort(begins=begins, sent_s=time.monotonic()))


# The request is refused, or its answer arrives.


@http_hooks.at(f"{_MANAGER}._handle_abort_req", BEFORE, "recv_obj")
def _before_abort_req(self: Manager, recv_obj: AbortReq) -> None:
    # Another HTTP process may have switched refusals on.
    if (ours := http_state(self)) is not None and note_refusal(self, recv_obj):
        ours.may_refuse = True


@http_hooks.at(f"{_MANAGER}._handle_batch_output", BEFORE, "recv_obj")
def _before_output(self: Manager, recv_obj: BatchStrOutput) -> None:
    if (ours := http_state(self)) is not None:
        learn(self, ours.client, recv_obj)


@http_hooks.at(f"{_MANAGER}.get_internal_state", AROUND)
async def _around_internal_state(original: Awaited, self: Manager) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = await original(self)
    if (ours := http_state(self)) is not None:
        for state in states:
            state["sage"] |= ours.stats()
            state["sage"]["slo"] |= ours.claims.stats()
    return states


# For the process that starts several HTTP processes (--tokenizer-worker-num).

router_hooks = Hooks()


def serve_our_app() -> None:
    """Make the HTTP processes serve our app. Call this before they start, because they inherit the
    environment variable."""
    os.environ[APP_VARIABLE] = APP


@router_hooks.at(
    "sglang.srt.managers.multi_tokenizer_mixin.MultiTokenizerRouter.__init__", AFTER, "server_args"
)
def _after_router(_: None, self: object, server_args: ServerArgs, *args: Any, **kw: Any) -> None:
    # The HTTP processes share one prediction worker, and find its address in these settings.
    config = getattr(server_args, "_sage_config", None)
    if config is not None and not config.predictor.service:
        worker = SharedWorker(config)
        worker.start()
        server_args._sage_config = worker.config
