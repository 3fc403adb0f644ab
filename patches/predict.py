"""HTTP-process hooks: a prediction joins each request, and its length goes into the history."""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus

from patches.carrier import encode, encode_hints, hints_of, strip
from patches.hook import AFTER, AROUND, BEFORE, Hook
from predictor_store.client import Prediction, PredictorClient

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
# More text than the embedder reads; decoding 100,000 token ids would hold up the event loop.
_MAX_DECODED_TOKENS = 512


def predict_hooks() -> list[Hook]:
    """The hooks for the HTTP process. They act for managers whose --schedule-policy is ours."""
    return [
        Hook(f"{_MANAGER}.__init__", AFTER, _after_init, ("server_args",)),
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


def _client(manager: Any) -> PredictorClient | None:
    return getattr(manager, "sage_client", None)


def _after_init(result: None, self: Any, server_args: Any, *args: Any, **kw: Any) -> None:
    config = getattr(server_args, "_sage_config", None)
    if config is not None:
        self.sage_client = PredictorClient(config)
        self.sage_client.start()  # the schedulers are loading the model meanwhile


def _before_batch(self: Any, obj: Any, *args: Any, **kw: Any) -> None:
    # SGLang goes on to tokenize the batch one by one; predictions are better made together.
    if isinstance(obj, GenerateReqInput) and _client(self) is not None:
        for i in range(obj.batch_size):
            _start_prediction(self, obj[i])


async def _around_tokenize_one(original: Any, self: Any, obj: Any, *args: Any, **kw: Any) -> Any:
    _start_prediction(self, obj)
    tokenized = await original(self, obj, *args, **kw)
    await _attach(obj, tokenized)
    return tokenized


async def _around_tokenize_batch(original: Any, self: Any, batch_size: int, obj: Any) -> Any:
    tokenized = await original(self, batch_size, obj)
    for i in range(batch_size):
        await _attach(obj[i], tokenized[i])
    return tokenized


def _start_prediction(manager: Any, obj: Any) -> None:
    """Strip what only we may write, and ask for the prediction, once per request."""
    client = _client(manager)
    if client is None or not isinstance(obj, GenerateReqInput) or hasattr(obj, "_sage_prediction"):
        return
    obj._sage_hints = {}
    if isinstance(obj.sampling_params, dict) and "custom_params" in obj.sampling_params:
        # A copy: the samples of a batch may share one dict with what the client sent.
        stripped = strip(obj.sampling_params["custom_params"])
        obj.sampling_params = {**obj.sampling_params, "custom_params": stripped}
        if manager.server_args._sage_config.hints.trust == "body" and isinstance(stripped, dict):
            obj._sage_hints = encode_hints(hints_of(stripped))
    obj._sage_prediction = None
    if not _is_internal(manager, obj) and (text := _prompt_text(manager, obj)) is not None:
        obj._sage_prediction = asyncio.ensure_future(client.predict(text, _scope(obj)))


async def _attach(obj: Any, tokenized: Any) -> None:
    sampling = tokenized.sampling_params
    carried = getattr(obj, "_sage_hints", {})
    task = getattr(obj, "_sage_prediction", None)
    if task is not None:
        prediction: Prediction = await task
        obj._sage_handle = prediction.handle
        if (lengths := prediction.distribution) is not None:
            cap_tokens = sampling.max_new_tokens
            lengths = lengths if cap_tokens is None else lengths.capped(cap_tokens)
            carried = {**carried, **encode(lengths)}
    if carried:
        sampling.custom_params = {**(sampling.custom_params or {}), **carried}


def _before_abort(self: Any, rid: str = "", abort_all: bool = False) -> None:
    """Note an abort that comes while the prediction is awaited: it would reach the schedulers
    before its request, match nothing, and be lost, as SGLang sends one abort a request."""
    states = self.rid_to_state.values() if abort_all else [self.rid_to_state.get(rid)]
    for state in states:
        if state is not None and not state.dispatched and hasattr(state.obj, "_sage_prediction"):
            # On the request, as its samples (n above 1) get other ids and states, but copies of it.
            state.obj._sage_aborted = True


async def _around_send_one(original: Any, self: Any, tokenized_obj: Any) -> None:
    await original(self, tokenized_obj)
    _abort_again(self, tokenized_obj.rid)


async def _around_send_batch(original: Any, self: Any, tokenized_objs: Any) -> None:
    await original(self, tokenized_objs)
    for tokenized_obj in tokenized_objs:
        _abort_again(self, tokenized_obj.rid)


def _abort_again(manager: Any, rid: str) -> None:
    """Send an abort behind the request that it overtook."""
    state = manager.rid_to_state.get(rid)
    if state is not None and getattr(state.obj, "_sage_aborted", False):
        state.abort_sent = False
        manager.abort_request(rid)


def _before_output(self: Any, recv_obj: Any) -> None:
    client = _client(self)
    if client is None:
        return
    for i, rid in enumerate(recv_obj.rids):
        reason = recv_obj.finished_reasons[i]
        state = self.rid_to_state.get(rid) if reason is not None else None
        handle = getattr(state.obj, "_sage_handle", None) if state is not None else None
        if handle is None or reason["type"] not in ("stop", "length", "abort"):
            continue
        input_tokens, output_tokens = recv_obj.prompt_tokens[i], recv_obj.completion_tokens[i]
        if output_tokens > 0:  # else it only filled the prefix cache, for n > 1
            cut = reason["type"] != "stop"
            client.finished(handle, input_tokens, output_tokens, cut)


async def _around_internal_state(original: Any, self: Any) -> Any:
    states = await original(self)
    if (client := _client(self)) is not None:
        for state in states:
            state["sage"]["predictor"] = client.stats()
    return states


def _after_getitem(sub: Any, self: Any, i: int) -> None:
    if hasattr(self, "_sage_text"):
        sub._sage_text = self._sage_text


def _after_chat(result: Any, self: Any, request: Any, *args: Any, **kw: Any) -> None:
    text = _last_user_text(request.messages)
    if text is not None:
        result[0]._sage_text = text


def _scope(obj: Any) -> str:
    """Whose answers these are: the LoRA adapter's."""
    lora = obj.lora_path
    return lora if isinstance(lora, str) else ""


def _is_internal(manager: Any, obj: Any) -> bool:
    """Health checks, and what the HTTP server sends itself before it reports ready."""
    if isinstance(obj.rid, str) and obj.rid.startswith(HEALTH_CHECK_RID_PREFIX):
        return True
    # The Engine API has no HTTP server, sends itself nothing and never reports ready.
    serves_http = manager._server_stop_hook is not None
    return serves_http and manager.server_status == ServerStatus.Starting


def _prompt_text(manager: Any, obj: Any) -> str | None:
    """What the user asked, as text; None where there is none (input_embeds, invalid token ids)."""
    text = getattr(obj, "_sage_text", None) or obj.text
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
            content = message.content
            if isinstance(content, str):
                return content
            texts = (getattr(part, "text", None) for part in content or [])
            return "\n".join(text for text in texts if isinstance(text, str))
    return None
