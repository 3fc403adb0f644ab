"""What the HTTP process keeps of one request, and the prompt that is to be predicted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.tokenizer_manager import ServerStatus

from patches.hook import AFTER, Hook
from patches.http.asked import asked_of_chat, text_of
from patches.http.dispatch import Foreseen
from patches.http_types import Request, TokenizerManager
from predictor_store.predict.asked import Asked
from predictor_store.service.client import Prediction

_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
# More text than the embedder reads; decoding 100,000 token ids would hold up the event loop.
_MAX_DECODED_TOKENS = 512


@dataclass(slots=True)
class RequestPrediction:
    """`Request.sage`: what we keep for one request. Its samples (n above 1) are copies of it with
    other ids, and share this.

    text: of a chat, its last user message; else None. asked: of a chat, what is asked beside; else
    None. slo_class: None before it was asked. came_s: when it came (time.monotonic). is_started:
    whether what we alone may write was stripped, and a prediction asked for, if there is to be one.
    explains: whether its answer is to say what was predicted of it. carried: what travels with it.
    foreseen: what a router goes by. tell_at_tokens: once its answer is as long and goes on, the
    history is to know.
    """

    text: str | None = None
    asked: Asked | None = None
    slo_class: str | None = None
    tenant: str = ""
    came_s: float = 0.0
    carried: dict[str, Any] = field(default_factory=dict)
    foreseen: Foreseen = field(default_factory=Foreseen)
    prediction: asyncio.Future[Prediction] | None = None
    handle: int | None = None
    tell_at_tokens: int = 64
    is_started: bool = False
    explains: bool = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # SGLang pickles requests when it dumps them. What awaits a prediction cannot be pickled,
        # and who reads a dump may not have this package.
        return dict, ()

    def __deepcopy__(self, memo: object) -> RequestPrediction:
        return self


def state_of(obj: Request) -> RequestPrediction:
    """Made if it is not there."""
    if not hasattr(obj, "sage"):
        obj.sage = RequestPrediction()
    state: RequestPrediction = obj.sage
    return state


def request_hooks() -> list[Hook]:
    """For a request's parts and for chats, whose text is known best where they come in."""
    return [
        Hook(f"{_REQUEST}.__getitem__", AFTER, _after_getitem, ("i",)),
        Hook(f"{_CHAT}._convert_to_internal_request", AFTER, _after_chat, ("request",)),
    ]


def _after_getitem(sub: Request, self: Request, i: int) -> None:
    state_of(sub).text = state_of(self).text
    state_of(sub).asked = state_of(self).asked


def _after_chat(
    result: tuple[Request, object], self: object, request: Any, *args: Any, **kw: Any
) -> None:
    state = state_of(result[0])
    state.text = _last_user_text(request.messages)
    state.asked = asked_of_chat(request)


def scope_of(obj: Request) -> str:
    """Whose answers these are: the LoRA adapter's."""
    lora = obj.lora_path
    return lora if isinstance(lora, str) else ""


def is_internal(manager: TokenizerManager, obj: Request) -> bool:
    """Health checks, and what the HTTP server sends itself before it reports ready."""
    if isinstance(obj.rid, str) and obj.rid.startswith(HEALTH_CHECK_RID_PREFIX):
        return True
    # The Engine API has no HTTP server, sends itself nothing and never reports ready.
    serves_http = manager._server_stop_hook is not None
    return serves_http and manager.server_status == ServerStatus.Starting


def prompt_text(manager: TokenizerManager, obj: Request) -> str | None:
    """What the user asked, as text; None where there is none (input_embeds, invalid token ids)."""
    text = state_of(obj).text or obj.text
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
