"""The state of one request in an HTTP process, and the chat that it was made from."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager

from patches.hook import AFTER, BEFORE, Hooks
from patches.http.asked import asked_of_chat, text_of
from predictor_store.predict.asked import Asked
from predictor_store.service.client import Prediction
from sage_sched.job import NO_HINTS, BatchPart, Hints

# Tokens decoded from each end of a prompt: more than the predictor reads. Decoding 100,000 token
# ids would block the event loop.
_MAX_DECODED_TOKENS = 512
# The function of entrypoints/http_server.py that makes health checks.
_HEALTH_ROUTE = "health_generate"
_SERVING_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
# The chat that this task answers: its last user message, and its other signs of length.
_CHAT = ContextVar[tuple[str | None, Asked] | None]("the chat", default=None)


@dataclass(slots=True)
class Incoming:
    """Our state of one request and of its samples (n above 1), which are copies of the request. It
    is kept as `GenerateReqInput.sage`.

    text, asked: the last user message of a chat, and its other signs of length; None for other
        requests.
    hints, batch: the hints for the scheduler, and the batch that it is a part of.
    expected_tokens: the length that a gateway expects; None if it expects none.
    came_s, begun_s: when it arrived, and when SGLang began to process it (a pause may hold it
        back), by time.monotonic. 0 until then.
    is_internal: see is_internal().
    is_dry_run: whether it only asks how long it would take.
    told: the place for a refusal until its HTTP answer is sent (patches/http/refused.py); None if
        it needs none.
    num_regex_steps: the steps of a matcher that its stop_regex may take in each decode step.
    tell_at_tokens: the age in tokens at which the history learns that the answer goes on.
    """

    text: str | None = None
    asked: Asked | None = None
    hints: Hints = NO_HINTS
    batch: BatchPart | None = None
    expected_tokens: int | None = None
    came_s: float = 0.0
    begun_s: float = 0.0
    is_internal: bool = False
    prediction: asyncio.Future[Prediction] | None = None
    handle: int | None = None
    is_dry_run: bool = False
    told: dict[str, Any] | None = None
    num_regex_steps: float = 0.0
    tell_at_tokens: int = 64

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # SGLang pickles requests when it dumps them. A future cannot be pickled, and the reader of
        # a dump may not have this package.
        return dict, ()

    def __deepcopy__(self, memo: object) -> Incoming:
        return self


def incoming(obj: GenerateReqInput) -> Incoming:
    """Return the state of a request, and make it if it is absent."""
    if not hasattr(obj, "sage"):
        obj.sage = Incoming()
    kept: Incoming = obj.sage
    return kept


def new_parts(
    manager: TokenizerManager, obj: GenerateReqInput, request: Any
) -> list[GenerateReqInput]:
    """Return the request, or the requests of a batch, each with its own Incoming. Samples are left
    out: they are copies of an earlier request."""
    whole = incoming(obj)
    if whole.came_s:
        return []
    whole.is_internal = is_internal(manager, request)
    if whole.asked is None and (chat := _CHAT.get()) is not None:
        whole.text, whole.asked = chat
    parts = parts_of(obj)
    for part in parts:
        if part is not obj:
            part.sage = replace(whole)
    return parts


def parts_of(obj: GenerateReqInput) -> list[GenerateReqInput]:
    """Return the request, or the requests of a batch."""
    if getattr(obj, "is_single", True):  # a part of a batch has no such attribute
        return [obj]
    return [obj[i] for i in range(obj.batch_size)]


chat_hooks = Hooks()


@chat_hooks.at(f"{_SERVING_CHAT}._convert_to_internal_request", AFTER, "request")
def _after_chat(
    result: tuple[GenerateReqInput, object], self: object, request: Any, *args: Any, **kw: Any
) -> None:
    # A chat's text is read here, because SGLang's own request has only the whole prompt.
    kept = incoming(result[0])
    kept.text, kept.asked = last_user_text(request.messages), asked_of_chat(request)


@chat_hooks.at(f"{_SERVING_CHAT}._process_messages", BEFORE, "request")
def _before_messages(self: object, request: Any, *args: Any, **kw: Any) -> None:
    # /v1/responses continues from here in the same task; chats do so in a thread.
    _CHAT.set((last_user_text(request.messages), asked_of_chat(request)))


def last_user_text(messages: Any) -> str | None:
    """Return the text of a chat's last user message. The rest of the chat template says nothing
    about the answer."""
    by_user = (message for message in reversed(messages) if getattr(message, "role", "") == "user")
    return next(map(text_of, by_user), None)


def prompt_text(manager: TokenizerManager, obj: GenerateReqInput) -> str | None:
    """Return the user's prompt as text. Return None if there is none (input_embeds, invalid token
    ids), or if the request is internal."""
    kept = incoming(obj)
    if kept.is_internal:
        return None
    text = kept.text or obj.text
    if text is None and obj.input_ids is not None and manager.tokenizer is not None:
        try:
            ids = obj.input_ids
            if len(ids) > 2 * _MAX_DECODED_TOKENS:
                ids = [*ids[:_MAX_DECODED_TOKENS], *ids[-_MAX_DECODED_TOKENS:]]
            text = manager.tokenizer.decode(ids)
        except Exception:  # a client may send anything; SGLang reports the fault
            return None
    return text if isinstance(text, str) else None


def route_of(request: Any) -> str | None:
    """Return the name of the function that a FastAPI request was routed to, or None."""
    return getattr(getattr(request, "scope", {}).get("endpoint"), "__name__", None)


def is_internal(manager: TokenizerManager, request: Any) -> bool:
    """Whether a request is a health check, or sent by the HTTP server to itself before it is ready.

    Trap: the request's id does not show this, because clients choose it.

    request: FastAPI's; None without an HTTP server.
    """
    if route_of(request) == _HEALTH_ROUTE:
        return True
    # The Engine API has no HTTP server, sends itself nothing and never reports ready.
    serves_http = manager._server_stop_hook is not None
    return serves_http and manager.server_status == ServerStatus.Starting
