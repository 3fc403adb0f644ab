"""HTTP-process hooks: a prediction joins each request, and its length goes into the history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.utils import TypeBasedDispatcher

from patches.carrier import (
    EXPLANATION,
    clients_hints,
    encode,
    encode_asked,
    encode_explain,
    encode_hints,
    encode_stamp,
    strip,
)
from patches.hook import AFTER, AROUND, BEFORE, Hook
from patches.http.asked import asked_of
from patches.http.dead_replica import ActiveRanks, bury, end
from patches.http.dispatch import Dispatch, Foreseen
from patches.http.door import check_token_ids, check_tokenized, custom_params_of
from patches.http.metrics import HttpMetrics
from patches.http.request_prediction import (
    is_internal,
    prompt_text,
    request_hooks,
    scope_of,
    state_of,
)
from patches.http.settings_route import add_settings_route
from patches.http.urgency import UrgencyGuess
from patches.http_types import (
    Awaited,
    BatchOutput,
    ReqState,
    Request,
    ServerArgs,
    TokenizedRequest,
    TokenizerManager,
)
from patches.messages import EarlyAbort, StepTimes, dispatches
from predictor_store.service.client import PredictorClient
from sage_sched.job import NO_HINTS
from sage_sched.slo.classes import SloClaims

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CLASS_HEADER = "x-smg-priority"
_TENANT_HEADER = "x-sage-tenant"
_EXPLAIN_HEADER = "x-sage-explain"


def predict_hooks() -> list[Hook]:
    """The hooks for the HTTP process. They act for managers whose --schedule-policy is ours."""
    return [
        Hook(f"{_MANAGER}.__init__", AFTER, _after_init, ("server_args",)),
        Hook(f"{_MANAGER}._init_req_state", BEFORE, _before_init_state, ("obj", "request")),
        Hook(f"{_MANAGER}._handle_batch_request", BEFORE, _before_batch, ("obj",)),
        Hook(f"{_MANAGER}._tokenize_one_request", AROUND, _around_tokenize_one, ("obj",)),
        Hook(
            f"{_MANAGER}._batch_tokenize_and_process",
            AROUND,
            _around_tokenize_batch,
            ("batch_size", "obj"),
        ),
        Hook(f"{_MANAGER}.abort_request", BEFORE, _before_abort, ("rid", "abort_all")),
        Hook(f"{_MANAGER}._send_one_request", AROUND, _around_send_one, ("tokenized_obj",)),
        Hook(f"{_MANAGER}._send_batch_request", AROUND, _around_send_batch, ("tokenized_objs",)),
        Hook(f"{_MANAGER}._handle_batch_output", BEFORE, _before_output, ("recv_obj",)),
        Hook(f"{_MANAGER}.update_active_ranks", BEFORE, _before_active_ranks, ("ranks",)),
        Hook(
            f"{_MANAGER}.update_request_meta_info",
            AROUND,
            _around_meta_info,
            ("meta_info", "customized_info", "index"),
        ),
        Hook(f"{_MANAGER}.get_internal_state", AROUND, _around_internal_state, ()),
        *request_hooks(),
    ]


def _client(manager: TokenizerManager) -> PredictorClient | None:
    return getattr(manager, "sage_client", None)


def _after_init(
    result: None, self: TokenizerManager, server_args: ServerArgs, *args: Any, **kw: Any
) -> None:
    config = getattr(server_args, "_sage_config", None)
    if config is not None:
        self.sage_claims = SloClaims(config.slo)
        self.sage_urgency = UrgencyGuess(config.urgency)
        model = server_args.served_model_name or server_args.model_path
        self.sage_client = PredictorClient(config, model)
        self.sage_metrics = HttpMetrics(self)
        add_settings_route(self)
        self.sage_dispatch = None
        if dispatches(server_args, config):
            dispatch = Dispatch(server_args.dp_size, config, self.load_snapshot_reader)
            self.sage_dispatch = dispatch
            self._result_dispatcher += TypeBasedDispatcher([(StepTimes, dispatch.told)])
        self.sage_client.start()  # the schedulers are loading the model meanwhile


def _before_init_state(
    self: TokenizerManager, obj: Request, request: Any = None, *args: Any, **kw: Any
) -> None:
    """Every route comes by here. Samples are copies, which are of a class already."""
    if _client(self) is None or not isinstance(obj, GenerateReqInput):
        return
    headers = {} if request is None else request.headers
    header = headers.get(_CLASS_HEADER)
    self.sage_metrics.start()
    is_batch = not getattr(obj, "is_single", True)  # a part of a batch does not say
    for part in [obj[i] for i in range(obj.batch_size)] if is_batch else [obj]:
        state = state_of(part)
        if state.slo_class is None:
            state.slo_class = self.sage_claims.class_of(header, part.priority)
            state.tenant = headers.get(_TENANT_HEADER, "")
            state.came_s = time.monotonic()
            state.explains = headers.get(_EXPLAIN_HEADER, "").lower() in ("1", "true", "yes")


def _before_batch(self: TokenizerManager, obj: Request, *args: Any, **kw: Any) -> None:
    # SGLang goes on to tokenize the batch one by one; predictions are better made together.
    if isinstance(obj, GenerateReqInput) and _client(self) is not None:
        for i in range(obj.batch_size):
            _start_prediction(self, obj[i])


async def _around_tokenize_one(
    original: Awaited, self: TokenizerManager, obj: Request, *args: Any, **kw: Any
) -> TokenizedRequest:
    _start_prediction(self, obj)
    tokenized: TokenizedRequest = await original(self, obj, *args, **kw)
    await _attach(obj, tokenized)
    return tokenized


async def _around_tokenize_batch(
    original: Awaited, self: TokenizerManager, batch_size: int, obj: Request
) -> list[TokenizedRequest]:
    tokenized: list[TokenizedRequest] = await original(self, batch_size, obj)
    for i in range(batch_size):
        await _attach(obj[i], tokenized[i])
    return tokenized


def _start_prediction(manager: TokenizerManager, obj: Request) -> None:
    """Strip what only we may write, and ask for the prediction, once per request."""
    client = _client(manager)
    if client is None or not isinstance(obj, GenerateReqInput) or state_of(obj).is_started:
        return
    state = state_of(obj)
    state.is_started = True
    check_token_ids(manager, obj)
    said, given = NO_HINTS, custom_params_of(obj)
    if given is not None:
        stripped = strip(given)
        # A copy: the samples of a batch may share one dict with what the client sent.
        obj.sampling_params = {**obj.sampling_params, "custom_params": stripped}
        if stripped.get("explain") is True:
            state.explains = True
        if manager.server_args._sage_config.hints.trust == "body":
            said = clients_hints(stripped)
    text = None if is_internal(manager, obj) else prompt_text(manager, obj)
    hints = manager.sage_claims.hints(state.slo_class or "", said, obj.priority, state.tenant)
    hints = manager.sage_urgency.hints(hints, text)
    state.carried = {**encode_hints(hints), **encode_stamp(state.came_s)}
    if isinstance(obj.rid, str):
        state.carried |= encode_asked(obj.rid, state.came_s, time.monotonic())
    if state.explains:
        state.carried |= encode_explain()
    state.foreseen = Foreseen(hints=hints)
    if text is not None:
        asked = asked_of(obj, state.asked)
        state.prediction = asyncio.ensure_future(
            manager.sage_metrics.timed(client.predict(text, scope_of(obj), asked))
        )


async def _attach(obj: Request, tokenized: TokenizedRequest) -> None:
    check_tokenized(tokenized)
    sampling, state = tokenized.sampling_params, state_of(obj)
    carried = state.carried
    if state.prediction is not None:
        prediction = await state.prediction
        state.handle = prediction.handle
        if (lengths := prediction.distribution) is not None:
            cap_tokens = sampling.max_new_tokens
            lengths = lengths if cap_tokens is None else lengths.capped(cap_tokens)
            carried = {**carried, **encode(lengths)}
            state.foreseen = replace(state.foreseen, distribution=lengths)
    if carried:
        sampling.custom_params = {**(sampling.custom_params or {}), **carried}


def _before_abort(self: TokenizerManager, rid: str = "", abort_all: bool = False) -> None:
    if _client(self) is not None:
        tell_early_abort(self, rid, abort_all)


def tell_early_abort(manager: TokenizerManager, rid: str, abort_all: bool) -> None:
    """Tell the schedulers of an abort if it may reach them before its request does
    (patches/scheduler/early_aborts.py)."""
    if abort_all or _is_early(manager, rid):
        begins = "" if abort_all else rid
        manager._dispatch_to_scheduler(EarlyAbort(begins=begins, sent_s=time.monotonic()))


def _is_early(manager: TokenizerManager, rid: str) -> bool:
    """A request that this process does not know may be waiting in another one."""
    state = manager.rid_to_state.get(rid)
    if state is None:
        return rid != "" and manager.server_args.tokenizer_worker_num > 1
    return not state.dispatched


async def _around_send_one(
    original: Awaited, self: TokenizerManager, tokenized_obj: TokenizedRequest
) -> None:
    if _dispatch(self, tokenized_obj):
        await original(self, tokenized_obj)


async def _around_send_batch(
    original: Awaited, self: TokenizerManager, tokenized_objs: Sequence[TokenizedRequest]
) -> None:
    tokenized_objs = [each for each in tokenized_objs if _dispatch(self, each)]
    if tokenized_objs:
        await original(self, tokenized_objs)


def _dispatch(manager: TokenizerManager, tokenized: TokenizedRequest) -> bool:
    """Pick its replica. What a health check tries, and where a session is, SGLang knows. Whether it
    is to be sent: not to one that has died, of which its client then hears."""
    dispatch = getattr(manager, "sage_dispatch", None)
    state = manager.rid_to_state.get(tokenized.rid)
    if dispatch is None or state is None or not isinstance(state.obj, GenerateReqInput):
        return True
    if is_internal(manager, state.obj) or state.obj.session_params:
        return True
    given, foreseen = state.obj.routed_dp_rank, state_of(state.obj).foreseen
    if dispatch.send(tokenized, given, foreseen, manager.rid_to_state):
        return True
    # Not before SGLang waits for it, which it begins to as soon as it has sent it.
    asyncio.get_running_loop().call_soon(end, manager, [tokenized.rid], given)
    return False


def _before_active_ranks(self: TokenizerManager, ranks: ActiveRanks) -> None:
    if _client(self) is not None:
        bury(self, ranks)


def _before_output(self: TokenizerManager, recv_obj: BatchOutput) -> None:
    client = _client(self)
    if client is None:
        return
    if self.sage_dispatch is not None:
        ended = [reason is not None for reason in recv_obj.finished_reasons]
        told = zip(recv_obj.rids, recv_obj.completion_tokens, ended, strict=True)
        self.sage_dispatch.heard(told)
    for i, (rid, reason) in enumerate(zip(recv_obj.rids, recv_obj.finished_reasons, strict=True)):
        state = self.rid_to_state.get(rid)
        if state is None or (known := state_of(state.obj)).handle is None:
            continue
        handle = known.handle
        input_tokens, output_tokens = recv_obj.prompt_tokens[i], recv_obj.completion_tokens[i]
        if reason is None:
            if output_tokens >= known.tell_at_tokens:
                # Seldom: a message for each doubling.
                known.tell_at_tokens = 2 * output_tokens
                client.goes_on(handle, input_tokens, output_tokens)
        # Without tokens it only filled the prefix cache, for n > 1.
        elif output_tokens > 0 and reason["type"] in ("stop", "length", "abort"):
            cut = reason["type"] != "stop"
            client.finished(handle, input_tokens, output_tokens, cut)


def _around_meta_info(
    original: Callable[..., None],
    self: TokenizerManager,
    meta_info: dict[str, Any],
    state: ReqState,
    customized_info: dict[str, Any],
    index: int,
    *args: Any,
    **kw: Any,
) -> None:
    others = {name: told for name, told in customized_info.items() if name != EXPLANATION}
    original(self, meta_info, state, others, index, *args, **kw)
    # The scheduler's facts about this request, as last told, if it told any.
    facts = [each for each in customized_info.get(EXPLANATION, ())[index : index + 1] if each]
    if facts and facts[0][-1] is not None:
        meta_info[EXPLANATION] = facts[0][-1]


async def _around_internal_state(original: Awaited, self: TokenizerManager) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = await original(self)
    if (client := _client(self)) is not None:
        for state in states:
            state["sage"]["predictor"] = client.stats()
            state["sage"]["slo"] |= self.sage_claims.stats()
            state["sage"]["urgency"] = self.sage_urgency.stats()
            if self.sage_dispatch is not None:
                state["sage"]["router"] = self.sage_dispatch.stats()
    return states
