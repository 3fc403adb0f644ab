"""HTTP-process hooks: a prediction joins each request, and its length goes into the history."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus

from patches.asked import asked_of, asked_of_chat, text_of
from patches.carrier import clients_hints, encode, encode_hints, encode_stamp, strip
from patches.dispatch import Dispatch, Foreseen
from patches.hook import AFTER, AROUND, BEFORE, Hook
from patches.http_types import (
    Awaited,
    BatchOutput,
    Request,
    ServerArgs,
    TokenizedRequest,
    TokenizerManager,
)
from patches.urgency import UrgencyGuess
from predictor_store.asked import Asked
from predictor_store.client import Prediction, PredictorClient
from sage_sched.job import NO_HINTS
from sage_sched.policy import policy_type
from sage_sched.slo import SloClaims

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
_CLASS_HEADER = "x-smg-priority"
# More text than the embedder reads; decoding 100,000 token ids would hold up the event loop.
_MAX_DECODED_TOKENS = 512


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
        Hook(f"{_MANAGER}.get_internal_state", AROUND, _around_internal_state, ()),
        Hook(f"{_REQUEST}.__getitem__", AFTER, _after_getitem, ("i",)),
        Hook(f"{_CHAT}._convert_to_internal_request", AFTER, _after_chat, ("request",)),
    ]


@dataclass(slots=True)
class RequestPrediction:
    """`Request.sage`: what we keep for one request. Its samples (n above 1) are copies of it with
    other ids, and share this.

    text: of a chat, its last user message; else None. asked: of a chat, what is asked beside; else
    None. slo_class: None before it was asked. came_s: when it came (time.monotonic). is_started:
    whether what we alone may write was stripped, and a prediction asked for, if there is to be one.
    carried: what travels with it. foreseen: what a router goes by. was_aborted: while that was
    awaited.
    """

    text: str | None = None
    asked: Asked | None = None
    slo_class: str | None = None
    came_s: float = 0.0
    carried: dict[str, Any] = field(default_factory=dict)
    foreseen: Foreseen = field(default_factory=Foreseen)
    prediction: asyncio.Future[Prediction] | None = None
    handle: int | None = None
    is_started: bool = False
    was_aborted: bool = False


def _state(obj: Request) -> RequestPrediction:
    if not hasattr(obj, "sage"):
        obj.sage = RequestPrediction()
    return obj.sage


def _client(manager: TokenizerManager) -> PredictorClient | None:
    return getattr(manager, "sage_client", None)


def _after_init(
    result: None, self: TokenizerManager, server_args: ServerArgs, *args: Any, **kw: Any
) -> None:
    config = getattr(server_args, "_sage_config", None)
    if config is not None:
        self.sage_claims = SloClaims(config.slo)
        self.sage_urgency = UrgencyGuess(config.urgency)
        self.sage_stamps = policy_type(server_args.schedule_policy).uses_clock or bool(
            config.slo.classes
        )
        model = server_args.served_model_name or server_args.model_path
        self.sage_client = PredictorClient(config, model)
        self.sage_dispatch = None
        if config.router.dispatch and server_args.dp_size > 1:
            self.sage_dispatch = Dispatch(server_args.dp_size, config, self.load_snapshot_reader)
        self.sage_client.start()  # the schedulers are loading the model meanwhile


def _before_init_state(
    self: TokenizerManager, obj: Request, request: Any = None, *args: Any, **kw: Any
) -> None:
    """Every route comes by here. Samples are copies, which are of a class already."""
    if _client(self) is None or not isinstance(obj, GenerateReqInput):
        return
    header = None if request is None else request.headers.get(_CLASS_HEADER)
    is_batch = not getattr(obj, "is_single", True)  # a part of a batch does not say
    for part in [obj[i] for i in range(obj.batch_size)] if is_batch else [obj]:
        state = _state(part)
        if state.slo_class is None:
            state.slo_class = self.sage_claims.class_of(header, part.priority)
            state.came_s = time.monotonic()


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
    if client is None or not isinstance(obj, GenerateReqInput) or _state(obj).is_started:
        return
    state = _state(obj)
    state.is_started = True
    said = NO_HINTS
    if isinstance(obj.sampling_params, dict) and "custom_params" in obj.sampling_params:
        # A copy: the samples of a batch may share one dict with what the client sent.
        stripped = strip(obj.sampling_params["custom_params"])
        obj.sampling_params = {**obj.sampling_params, "custom_params": stripped}
        if manager.server_args._sage_config.hints.trust == "body" and isinstance(stripped, dict):
            said = clients_hints(stripped)
    text = None if _is_internal(manager, obj) else _prompt_text(manager, obj)
    hints = manager.sage_claims.hints(state.slo_class or "", said, obj.priority)
    hints = manager.sage_urgency.hints(hints, text)
    stamp = encode_stamp(state.came_s) if manager.sage_stamps else {}
    state.carried = {**encode_hints(hints), **stamp}
    state.foreseen = Foreseen(hints=hints)
    if text is not None:
        asked = asked_of(obj, state.asked)
        state.prediction = asyncio.ensure_future(client.predict(text, _scope(obj), asked))


async def _attach(obj: Request, tokenized: TokenizedRequest) -> None:
    sampling, state = tokenized.sampling_params, _state(obj)
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
    """Note an abort that comes while the prediction is awaited: it would reach the schedulers
    before its request, match nothing, and be lost, as SGLang sends one abort a request."""
    states = self.rid_to_state.values() if abort_all else [self.rid_to_state.get(rid)]
    for state in states:
        if state is not None and not state.dispatched and _state(state.obj).is_started:
            _state(state.obj).was_aborted = True


async def _around_send_one(
    original: Awaited, self: TokenizerManager, tokenized_obj: TokenizedRequest
) -> None:
    _dispatch(self, tokenized_obj)
    await original(self, tokenized_obj)
    _abort_again(self, tokenized_obj.rid)


async def _around_send_batch(
    original: Awaited, self: TokenizerManager, tokenized_objs: Sequence[TokenizedRequest]
) -> None:
    for tokenized_obj in tokenized_objs:
        _dispatch(self, tokenized_obj)
    await original(self, tokenized_objs)
    for tokenized_obj in tokenized_objs:
        _abort_again(self, tokenized_obj.rid)


def _dispatch(manager: TokenizerManager, tokenized: TokenizedRequest) -> None:
    """Pick its replica. What a health check tries, and where a session is, SGLang knows."""
    dispatch = getattr(manager, "sage_dispatch", None)
    state = manager.rid_to_state.get(tokenized.rid)
    if dispatch is None or state is None or not isinstance(state.obj, GenerateReqInput):
        return
    if not _is_internal(manager, state.obj) and not state.obj.session_params:
        given, foreseen = state.obj.routed_dp_rank, _state(state.obj).foreseen
        dispatch.send(tokenized, given, foreseen, manager.rid_to_state)


def _abort_again(manager: TokenizerManager, rid: str) -> None:
    """Send an abort behind the request that it overtook."""
    state = manager.rid_to_state.get(rid)
    if state is not None and _state(state.obj).was_aborted:
        state.abort_sent = False
        manager.abort_request(rid)


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
        if reason is None or state is None or reason["type"] not in ("stop", "length", "abort"):
            continue
        handle = _state(state.obj).handle
        input_tokens, output_tokens = recv_obj.prompt_tokens[i], recv_obj.completion_tokens[i]
        # Without tokens it only filled the prefix cache, for n > 1.
        if handle is not None and output_tokens > 0:
            cut = reason["type"] != "stop"
            client.finished(handle, input_tokens, output_tokens, cut)


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


def _after_getitem(sub: Request, self: Request, i: int) -> None:
    _state(sub).text = _state(self).text
    _state(sub).asked = _state(self).asked


def _after_chat(
    result: tuple[Request, object], self: object, request: Any, *args: Any, **kw: Any
) -> None:
    state = _state(result[0])
    state.text = _last_user_text(request.messages)
    state.asked = asked_of_chat(request)


def _scope(obj: Request) -> str:
    """Whose answers these are: the LoRA adapter's."""
    lora = obj.lora_path
    return lora if isinstance(lora, str) else ""


def _is_internal(manager: TokenizerManager, obj: Request) -> bool:
    """Health checks, and what the HTTP server sends itself before it reports ready."""
    if isinstance(obj.rid, str) and obj.rid.startswith(HEALTH_CHECK_RID_PREFIX):
        return True
    # The Engine API has no HTTP server, sends itself nothing and never reports ready.
    serves_http = manager._server_stop_hook is not None
    return serves_http and manager.server_status == ServerStatus.Starting


def _prompt_text(manager: TokenizerManager, obj: Request) -> str | None:
    """What the user asked, as text; None where there is none (input_embeds, invalid token ids)."""
    text = _state(obj).text or obj.text
    if text is None and obj.input_ids is not None and manager.tokenizer is not None:
        try:
            text = manager.tokenizer.decode(obj.input_ids[:_MAX_DECODED_TOKENS])
        except Exception:  # whatever a client has sent; SGLang will say what is wrong with it
            return None
    return text if isinstance(text, str) else None


def _last_user_text(messages: Any) -> str | None:
    """The text of a chat's last user message; its template says nothing of the answer."""
    for message in reversed(messages):
        if getattr(message, "role", None) == "user":
            return text_of(message)
    return None
