"""A request's prediction: asked for when the request comes in, sent along with it to its scheduler,
and held against the answer's length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from sglang.srt.managers.io_struct import BatchStrOutput, GenerateReqInput
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput as Tokenized
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager

from patches import carrier
from patches.hook import AFTER, BEFORE, Hooks
from patches.http.asked import asked_of, asked_of_chat, own_stop_ids, scope_of, text_of
from patches.http.door import check_body, check_prompt, check_tokenized, custom_params_of
from patches.http.state import HttpState, http_state
from predictor_store.predict.asked import Asked, digest
from predictor_store.service.client import Prediction
from sage_sched.distribution import LengthDistribution

# Of each end: more than what is read there. Decoding 100,000 token ids would block the event loop.
_MAX_DECODED_TOKENS = 512
# The function of entrypoints/http_server.py that makes health checks.
_HEALTH_ROUTE = "health_generate"
# Of the chat that this task answers.
_CHAT = ContextVar[tuple[str | None, Asked] | None]("the chat", default=None)


@dataclass(slots=True)
class RequestPrediction:
    """`GenerateReqInput.sage`, of one request and its samples (n above 1), which are copies of it.

    text, asked: of a chat, its last user message and what it asks for beside its words; else None.
    told: what is believed of what others say in their own words (patches.http.foreign). slo_class:
    None until it is known. came_s: arrival (time.monotonic). carried: what travels to the
    scheduler. is_internal: see is_internal(). tell_at_tokens: the age at which the history is told
    that the answer goes on. is_started: whether the reserved keys were stripped and the prediction
    asked for. explains: whether the answer is to tell the prediction.
    """

    text: str | None = None
    asked: Asked | None = None
    told: dict[str, Any] = field(default_factory=dict)
    slo_class: str | None = None
    tenant: str = ""
    came_s: float = 0.0
    carried: dict[str, Any] = field(default_factory=dict)
    prediction: asyncio.Future[Prediction] | None = None
    handle: int | None = None
    is_internal: bool = False
    tell_at_tokens: int = 64
    is_started: bool = False
    explains: bool = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # SGLang pickles requests when it dumps them. A future cannot be pickled, and the reader of
        # a dump may not have this package.
        return dict, ()

    def __deepcopy__(self, memo: object) -> RequestPrediction:
        return self


def state_of(obj: GenerateReqInput) -> RequestPrediction:
    """Made if it is not there."""
    if not hasattr(obj, "sage"):
        obj.sage = RequestPrediction()
    state: RequestPrediction = obj.sage
    return state


request_hooks = Hooks()


@request_hooks.at("sglang.srt.managers.io_struct.GenerateReqInput.__getitem__", AFTER, "i")
def _after_getitem(sub: GenerateReqInput, self: GenerateReqInput, i: int) -> None:
    state_of(sub).text = state_of(self).text
    state_of(sub).asked = state_of(self).asked
    state_of(sub).is_internal = state_of(self).is_internal


@request_hooks.at(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
    BEFORE, "obj", "request",
)  # fmt: skip
def _before_generate(self: TokenizerManager, obj: GenerateReqInput, request: Any = None) -> None:
    # All routes pass here, before anything is made of what a client says.
    if isinstance(obj, GenerateReqInput):
        state_of(obj).is_internal = is_internal(self, request)
        if isinstance(http_state(self), HttpState):  # not in shadow mode
            check_body(obj, route_of(request))


@request_hooks.at(
    "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
    AFTER,
    "request",
)
def _after_chat(
    result: tuple[GenerateReqInput, object], self: object, request: Any, *args: Any, **kw: Any
) -> None:
    # Here a chat's text is known best.
    state = state_of(result[0])
    state.text, state.asked = last_user_text(request.messages), asked_of_chat(request)


@request_hooks.at(
    "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
    BEFORE,
    "request",
)
def _before_messages(self: object, request: Any, *args: Any, **kw: Any) -> None:
    # /v1/responses goes on from here by itself, in the same task; chats do so in a thread.
    _CHAT.set((last_user_text(request.messages), asked_of_chat(request)))


def take_up_chat(state: RequestPrediction) -> None:
    """What is known of the chat that a request is of, if its route has not said so."""
    if state.asked is None and (chat := _CHAT.get()) is not None:
        state.text, state.asked = chat


def last_user_text(messages: Any) -> str | None:
    """The text of a chat's last user message. The chat template tells nothing of the answer."""
    asked = (message for message in reversed(messages) if getattr(message, "role", "") == "user")
    return next(map(text_of, asked), None)


def prompt_text(manager: TokenizerManager, obj: GenerateReqInput) -> str | None:
    """What the user asked, as text; None if there is none (input_embeds, invalid token ids)."""
    text = state_of(obj).text or obj.text
    if text is None and obj.input_ids is not None and manager.tokenizer is not None:
        try:
            ids = obj.input_ids
            if len(ids) > 2 * _MAX_DECODED_TOKENS:
                ids = [*ids[:_MAX_DECODED_TOKENS], *ids[-_MAX_DECODED_TOKENS:]]
            text = manager.tokenizer.decode(ids)
        except Exception:  # a client may send anything; SGLang will say what is wrong with it
            return None
    return text if isinstance(text, str) else None


def route_of(request: Any) -> str | None:
    """The name of the function that a request of FastAPI was routed to; None if it was to none."""
    return getattr(getattr(request, "scope", {}).get("endpoint"), "__name__", None)


def is_internal(manager: TokenizerManager, request: Any) -> bool:
    """Whether it is a health check, or what the HTTP server sends itself before it is ready. The
    request's id does not say: clients choose it. request: of FastAPI; None without an HTTP
    server."""
    if route_of(request) == _HEALTH_ROUTE:
        return True
    # The Engine API has no HTTP server, sends itself nothing and never reports ready.
    serves_http = manager._server_stop_hook is not None
    return serves_http and manager.server_status == ServerStatus.Starting


def eos_ids_of(manager: TokenizerManager) -> set[int]:
    """The tokens that end each answer of this model."""
    of_config = getattr(manager.model_config, "hf_eos_token_id", None) or ()
    of_tokenizer = getattr(manager.tokenizer, "eos_token_id", None)
    return {*of_config} if of_tokenizer is None else {*of_config, of_tokenizer}


def was_stopped(
    manager: TokenizerManager, obj: GenerateReqInput, reason: Mapping[str, Any]
) -> bool:
    """Whether an answer ended, for this finish_reason, where its client wanted and not where the
    model did."""
    if reason["type"] != "stop":
        return False
    matched = reason.get("matched")
    return isinstance(matched, str) or matched in own_stop_ids(obj, eos_ids_of(manager))


def _session_of(manager: TokenizerManager, obj: GenerateReqInput) -> str:
    """A name for the session of SGLang's that a request is in; "" if it is in none."""
    params = obj.session_params
    name = params.get("id") if isinstance(params, dict) else None
    # Elsewhere it names who asks, and SGLang keeps nothing by it.
    if manager.server_args.enable_session_radix_cache:
        name = name or obj.session_id
    return carrier.session_of(name) if isinstance(name, str) and name else ""


def _chat_of(obj: GenerateReqInput, tenant: str) -> str:
    """A name for a chat, by its beginning; "" for other requests, and for several samples of one,
    which would look like a chat that goes on at once."""
    asked, sampling = state_of(obj).asked, obj.sampling_params
    num_samples = sampling.get("n") if isinstance(sampling, dict) else None
    if asked is None or not asked.session or num_samples not in (None, 1):
        return ""
    return digest(tenant, scope_of(obj).adapter, asked.session)


def start(manager: TokenizerManager, obj: GenerateReqInput) -> None:
    """Once per request: strip the reserved keys, and ask for the prediction."""
    ours = http_state(manager)
    if ours is None or not isinstance(obj, GenerateReqInput) or state_of(obj).is_started:
        return
    state = state_of(obj)
    state.is_started = True
    check_prompt(manager, obj)
    said, given = state.told, custom_params_of(obj)
    if given is not None:
        stripped = carrier.strip(given)
        # A copy: the samples of a batch may share one dict with what the client sent.
        obj.sampling_params = {**obj.sampling_params, "custom_params": stripped}
        if ours.config.hints.trust == "body":
            said = said | stripped
            state.explains |= stripped.get("explain") is True
    text = None if state.is_internal else prompt_text(manager, obj)
    hints = ours.claims.hints(
        state.slo_class or "", carrier.clients_hints(said), obj.priority, state.tenant
    )
    hints = ours.urgency.hints(hints, text)
    if not hints.session:
        session = _session_of(manager, obj) or _chat_of(obj, hints.tenant)
        hints = replace(hints, session=session)
    came = carrier.encode_asked(str(obj.rid), state.came_s, time.monotonic())
    state.carried = {**carrier.encode_hints(hints), **came}
    if state.explains:
        state.carried |= carrier.EXPLAIN
    if state.is_internal or not ours.predicts:
        return
    if text is None:  # a client must not choose to be without a prediction, and so without a rank
        state.prediction = asyncio.get_running_loop().create_future()
        state.prediction.set_result(Prediction(None, ours.client.prior))
    else:
        asked = asked_of(obj, state.asked, hints.tenant)
        scope = scope_of(obj, eos_ids_of(manager)).name
        state.prediction = asyncio.ensure_future(
            ours.metrics.timed(ours.client.predict(text, scope, asked))
        )


async def attach(manager: TokenizerManager, obj: GenerateReqInput, tokenized: Tokenized) -> None:
    """Wait for the prediction, and put what travels to the scheduler into custom_params."""
    check_tokenized(manager, obj, tokenized)
    sampling, state = tokenized.sampling_params, state_of(obj)
    carried = state.carried
    if state.prediction is not None:
        prediction = await state.prediction
        state.handle = prediction.handle
        lengths = prediction.distribution
        if (lengths is None or lengths.source == "prior") and "expected_tokens" in state.told:
            lengths = LengthDistribution.from_samples([state.told["expected_tokens"]], "hint")
        if lengths is not None:
            cap_tokens = sampling.max_new_tokens
            lengths = lengths if cap_tokens is None else lengths.capped(cap_tokens)
            carried = {**carried, **carrier.encode(lengths)}
    if carried:
        sampling.custom_params = {**(sampling.custom_params or {}), **carried}


def learn(manager: TokenizerManager, ours: HttpState, output: BatchStrOutput) -> None:
    """Tell the history of answers that have ended, and of long ones that go on."""
    for i, (rid, reason) in enumerate(zip(output.rids, output.finished_reasons, strict=True)):
        found = manager.rid_to_state.get(rid)
        if found is None or (state := state_of(found.obj)).handle is None:
            continue
        input_tokens, output_tokens = output.prompt_tokens[i], output.completion_tokens[i]
        if reason is None:
            if output_tokens >= state.tell_at_tokens:
                # Seldom: one message each time its length doubles.
                state.tell_at_tokens = 2 * output_tokens
                ours.client.goes_on(state.handle, input_tokens, output_tokens)
        # Without tokens it only filled the prefix cache, for n > 1.
        elif output_tokens > 0 and reason["type"] in ("stop", "length", "abort"):
            is_cut, stopped = reason["type"] != "stop", was_stopped(manager, found.obj, reason)
            ours.client.finished(state.handle, input_tokens, output_tokens, is_cut, stopped)
