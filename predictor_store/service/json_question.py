"""What a body of POST /predict may ask."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, NoReturn

from predictor_store.predict.asked import Asked

_MAX_NAME_CHARS = 1_000
_MAX_QUANTILES = 100
_MAX_TOKENS = 2**31
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class RequestError(Exception):
    """What is wrong, for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def json_question(content: bytes | bytearray) -> dict[str, Any]:
    """The fields of a request's body, all of them. Raises RequestError."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        _bad("the body is no JSON object")
    left_out: dict[str, Any] = {"lora": "", "asked": {}, "max_tokens": None}
    left_out["quantiles"] = list(_QUANTILES)
    asked = {**left_out, **body}
    allowed = ("model", "prompt", *left_out)
    for name in asked:
        if name not in allowed:
            _bad(f"unknown field {name[:100]!r}, allowed: {', '.join(allowed)}")
    for name in ("model", "prompt", "lora"):
        if not isinstance(asked.get(name), str):
            _bad(f"{name} must be a string")
    for name in ("model", "lora"):
        if len(asked[name]) > _MAX_NAME_CHARS:
            _bad(f"{name} may have {_MAX_NAME_CHARS} characters")
    if not isinstance(asked["asked"], dict):
        _bad("asked must be an object")
    try:
        Asked.from_fields(asked["asked"])
    except ValueError as error:
        _bad(f"asked is {error}")
    cap = asked["max_tokens"]
    if cap is not None and not (type(cap) is int and 1 <= cap < _MAX_TOKENS):
        _bad("max_tokens must be a whole number of at least 1")
    quantiles = asked["quantiles"]
    if not isinstance(quantiles, list) or not all(map(_is_share, quantiles)):
        _bad("quantiles must be a list of numbers from 0 to 1")
    if len(quantiles) > _MAX_QUANTILES:
        _bad(f"quantiles may be {_MAX_QUANTILES}")
    return asked


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _bad(message: str) -> NoReturn:
    raise RequestError(HTTPStatus.BAD_REQUEST, message)
