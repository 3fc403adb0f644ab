"""Defines the messages between HTTP processes and a prediction worker, as msgpack: one ZeroMQ frame
each.

A client sends Hello first and receives Welcome or Refused. It then sends Predict, Finished and
GoesOn. It ends with Goodbye, which the worker sends back when it has written everything
before it. The worker sends Predicted, and News once a second. Each client chooses its own handles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from predictor_store.predict.asked import NOTHING_ASKED, Asked
from predictor_store.predict.features import MAX_EXCERPT_CHARS
from predictor_store.predict.model import Stats
from sage_sched.distribution import LengthDistribution

# Increase this if a message changes. Hello and Refused never change, so that both sides can name
# both versions.
VERSION = 5
MAX_SCOPE_CHARS = 1_000
# Twice the size of the longest Predict, which has four bytes per character, and Asked.
MAX_BYTES = 1 << 16

_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Handle = Annotated[int, msgspec.Meta(ge=-(2**53), lt=2**53)]


class _Message(msgspec.Struct, tag=True, array_like=True):
    """A message as an array: a field is identified by its place, not by its name."""


class Hello(_Message):
    version: int
    model: str = ""


class Predict(_Message):
    """Asks for a prediction. scope: a name of predictor_store.predict.asked.Scope."""

    handle: _Handle
    text: Annotated[str, msgspec.Meta(max_length=MAX_EXCERPT_CHARS)]
    scope: Annotated[str, msgspec.Meta(max_length=MAX_SCOPE_CHARS)] = ""
    asked: Asked = NOTHING_ASKED


class Finished(_Message):
    """Reports an ended answer. censored: whether it was cut off. stopped: see
    predictor_store.predict.asked.Scope."""

    handle: _Handle
    input_tokens: _Tokens
    output_tokens: _Tokens
    censored: bool
    stopped: bool = False


class GoesOn(_Message):
    """Reports that an answer has this many tokens so far."""

    handle: _Handle
    input_tokens: _Tokens
    output_tokens: _Tokens


class Goodbye(_Message):
    pass


class Lengths(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a LengthDistribution."""

    lengths: list[int]
    weights: list[float]
    effective_samples: float
    source: str

    @classmethod
    def of(cls, distribution: LengthDistribution | None) -> Lengths | None:
        return None if distribution is None else cls(**distribution.as_fields())

    def read(self) -> LengthDistribution:
        """Return the distribution. Raises ValueError if the fields contradict one another."""
        return LengthDistribution.from_fields(msgspec.structs.asdict(self))


class Welcome(_Message):
    version: int
    stats: Stats
    prior: Lengths | None


class Refused(_Message):
    version: int
    why: str
    because: Literal["version", "model", "store", "busy"]


class Predicted(_Message):
    """Answers Predict. lengths: None if nothing is known."""

    handle: _Handle
    lengths: Lengths | None


class News(_Message):
    """Reports a worker's state once a second. prior: None if it has not changed."""

    stats: Stats
    prior: Lengths | None = None


ToWorker = Hello | Predict | Finished | GoesOn | Goodbye
ToClient = Welcome | Refused | Predicted | News | Goodbye

encode: Callable[[ToWorker | ToClient], bytes] = msgspec.msgpack.Encoder().encode
# Both raise ValueError.
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode


def valid(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode("utf-8")
