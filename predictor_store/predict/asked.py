"""Turns a request's fields, apart from its prompt's words, into features of its answer's length."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

# Increase this if the meaning of the numbers changes, so that no store mixes old and new ones.
VERSION = 1
_NUM_SYSTEM = 8
NUM_FEATURES = 16 + _NUM_SYSTEM
# The first numbers separate records; see kinds_of.
_NUM_KIND = 5
# The number of a session's answers that are kept. More would not improve predictions.
NUM_RECENT = 15
_Number = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
_Name = Annotated[str, msgspec.Meta(max_length=200)]


@dataclass(frozen=True, slots=True)
class Session:
    """The answers of a session so far.

    lengths: the lengths of the last NUM_RECENT uncut answers, in tokens, the newest last.
    total_tokens: the length of the last prompt with its answer.
    """

    num_answers: int = 0
    lengths: tuple[int, ...] = ()
    total_tokens: int = 0

    def after(self, input_tokens: int, output_tokens: int, *, cut: bool = False) -> Self:
        """Return the session after one more answer. cut: whether the answer was cut off; then its
        full length is unknown."""
        lengths = self.lengths if cut else (*self.lengths, max(output_tokens, 1))[-NUM_RECENT:]
        return type(self)(self.num_answers + 1, lengths, input_tokens + output_tokens)


NEW_SESSION = Session()


OWN, STOPPED, SHAPED = ".", "|", "="


class Scope(NamedTuple):
    """The limits of some answers. They decide which requests these answers help to predict.

    adapter: the LoRA adapter; "" for none.
    limits: names the request's other options that decide where an answer ends; "" for none.
    end: OWN if an answer ends by itself, so that it helps to predict any request. STOPPED if one of
        the limits ended it, so that it would have been longer without them. SHAPED if its words are
        not the model's own choice, so that it does not help to predict other requests.
    """

    adapter: str = ""
    limits: str = ""
    end: str = OWN

    @classmethod
    def read(cls, name: str) -> Self:
        head, found, adapter = name.partition("\n")
        return cls(adapter, head[1:], head[:1]) if found else cls(name)

    @property
    def name(self) -> str:
        """Return the scope's name in messages and stores. An adapter's name comes last, because it
        may be cut off."""
        return f"{self.end}{self.limits}\n{self.adapter}" if self.limits else self.adapter

    def stopped(self) -> Self:
        """Return the scope of an answer that its limits have ended."""
        return self._replace(end=STOPPED) if self.limits and self.end == OWN else self


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request's fields; 0, false or "" for missing ones.

    thinks: 1 if thinking is asked for, -1 if it is forbidden.
    effort: 1 for more than usual, -1 for less.
    tool_choice: 1 if a tool must be used, -1 if none may be used.
    is_constrained: whether the answer must follow a JSON schema, a grammar or the like.
    num_turns: the number of messages of a chat.
    input_tokens: the approximate length of the whole prompt.
    max_tokens: the cap.
    num_stops: the number of stop strings.
    system: names the system prompt.
    session: names the conversation.
    """

    thinks: _Number = 0
    effort: _Number = 0
    num_tools: _Number = 0
    tool_choice: _Number = 0
    is_constrained: bool = False
    num_turns: _Number = 0
    input_tokens: _Number = 0
    max_tokens: _Number = 0
    num_stops: _Number = 0
    system: _Name = ""
    session: _Name = ""

    def features(self, session: Session = NEW_SESSION) -> NDArray[np.float32]:
        """Return features of about the size of 1, float32, shape (NUM_FEATURES,). All are 0 if no
        field is set."""
        thinks, effort, choice = np.sign([self.thinks, self.effort, self.tool_choice])
        kind = (thinks, effort, self.num_tools > 0, choice, self.is_constrained)
        new_tokens = self.input_tokens - session.total_tokens
        logs = [math.log(length) / 3 for length in session.lengths]
        of_session = (
            bool(logs),
            math.log1p(session.num_answers) / 2,
            sum(logs) / len(logs) if logs else 0.0,
            logs[-1] if logs else 0.0,
            math.log1p(max(new_tokens, 0)) / 3 if logs else 0.0,
        )
        rest = (
            math.log1p(max(self.num_tools, 0)) / 2,
            math.log1p(max(self.num_turns, 0)) / 2,
            math.log1p(max(self.input_tokens, 0)) / 3,
            self.max_tokens > 0,
            math.log1p(max(self.max_tokens, 0)) / 3,
            self.num_stops > 0,
        )
        return np.array([*kind, *of_session, *rest, *_signs(self.system)], np.float32)


NOTHING_ASKED = Asked()


def kinds_of(features: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return numbers, shape (n,), for features, shape (n, NUM_FEATURES), that stand for thinking,
    effort, tools, tool choice and format. These can change the length of an answer to the same
    words considerably."""
    kinds: NDArray[np.int64] = features[:, :_NUM_KIND].astype(np.int64) @ 3 ** np.arange(_NUM_KIND)
    return kinds


def digest(*texts: str) -> str:
    """Return a short name for texts."""
    whole = "\0".join(texts).encode("utf-8", "replace")
    return hashlib.blake2b(whole, digest_size=12).hexdigest()


def _signs(system: str) -> NDArray[np.float32]:
    """Return random signs for a system prompt. They let a regression distinguish a few prompts."""
    if not system:
        return np.zeros(_NUM_SYSTEM, np.float32)
    bits = hashlib.blake2b(system.encode("utf-8", "replace"), digest_size=1).digest()[0]
    return np.array([0.5 if bits >> i & 1 else -0.5 for i in range(_NUM_SYSTEM)], np.float32)
