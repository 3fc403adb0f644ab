"""The events of one episode: clients, their requests, and disturbances.

The same seed gives the same scenario. The server's behaviour also depends on timing, so a failure
may not come back at the first try.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.engine.fuzz.claims import NO_CLAIMS, Claims, draw_claims
from tests.engine.fuzz.model import CHARACTERS, FIRST_ID, VOCAB_SIZE
from tests.engine.serving import LONG_PROMPT, SHORT_PROMPT

# Sampling parameters that ask for a grammar.
GRAMMARS = frozenset({"regex", "json_schema"})
# Of those, what SGLang counts token by token, and forgets where it retracts.
COUNTED = frozenset(
    {"frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"}
)
_REGEXES = ("(ab|cd|ef){25,30}", "[a-z]{20,40}", "([0-9]{3}-){8,12}x", "(yes|no)( (yes|no)){10,20}")
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "[a-z]{4,12}"},
            "rank": {"enum": ["first", "second", "third"]},
            "old": {"type": "boolean"},
        },
        "required": ["name", "rank", "old"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"type": "string", "pattern": "[a-f]{3,6}"},
        "minItems": 3,
        "maxItems": 6,
    },
)


class Kind(Enum):
    """The connection between the turns of a talk."""

    PLAIN = "each turn for itself, after the talk's opening"
    CHAT = "each turn sends all that was said, answers included"
    SESSION = "SGLang remembers what was said"
    STREAMING_SESSION = "SGLang keeps its KV, too"
    MESSAGES = "a chat through the OpenAI route"
    BATCH = "one call for all turns"


class Logprobs(Enum):
    NONE = 0
    OUTPUT = 1
    INPUT = 2
    TOP = 3


@dataclass(frozen=True, slots=True)
class Leave:
    """A client gives a request up: by /abort_request, or by closing the connection."""

    closes: bool
    after_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One question. words: new token ids, all of which are plain characters."""

    words: tuple[int, ...]
    sampling: Mapping[str, Any]
    pause_s: float = 0.0  # after the answer before
    stream: bool = False
    num_samples: int = 1
    logprobs: Logprobs = Logprobs.NONE
    leave: Leave | None = None
    as_text: bool = False
    claims: Claims = NO_CLAIMS

    @property
    def sampled(self) -> bool:
        """Whether its answer is drawn, so that no other run says the same."""
        return bool(self.sampling.get("temperature", 0) > 0)


@dataclass(frozen=True, slots=True)
class Talk:
    """A client's turns, one after the other. opening: token ids that other talks may share."""

    name: str
    at_s: float
    kind: Kind
    opening: tuple[int, ...]
    turns: tuple[Turn, ...]


class Trouble(Enum):
    """An operator's action on the server meanwhile."""

    FLUSH = "/flush_cache"
    ABORT_ALL = "/abort_request of all"
    PAUSE_ABORT = "/pause_generation, mode abort"
    PAUSE_IN_PLACE = "/pause_generation, mode in_place"
    PAUSE_RETRACT = "/pause_generation, mode retract"
    RETRACT_AND_FLUSH = "the same, and /flush_cache before it goes on"
    RETRACT_AND_UPDATE = "the same, and the weights are read again before it goes on"
    UPDATE = "/update_weights_from_disk"
    LOOK = "what it counts is read"
    SWITCH = "/sage/settings, and back"


@dataclass(frozen=True, slots=True)
class Disturbance:
    """settings: of a SWITCH."""

    at_s: float
    trouble: Trouble
    for_s: float
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    talks: tuple[Talk, ...]
    disturbances: tuple[Disturbance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The distributions of scenarios. Weights need not sum to 1; shares are of turns.

    max_tokens: of a whole talk, so that it fits into the pool.
    penalties: and min_new_tokens. With overlap, SGLang's own depend on who else is served.
    num_stop_ids: of those that stop at some token. SGLang's check that ranks agree compares the
        text of sets, which for more than one id depends on how it was made: then 1.
    claims: turns whose client says how important they are.
    policies: to which SWITCH troubles switch the server.
    """

    num_talks: int = 24
    span_s: float = 3.0
    max_tokens: int = 500
    families: Mapping[str, float] = field(
        default_factory=lambda: {
            "documents": 3.0, "chats": 1.5, "agents": 1.5, "singles": 3.0, "batches": 0.7,
            "messages": 0.7,
        }
    )  # fmt: skip
    leaving: float = 0.2
    grammar: float = 0.0
    penalties: bool = False
    num_stop_ids: int = 8
    troubles: Mapping[Trouble, float] = field(default_factory=dict)
    max_troubles: int = 2
    claims: float = 0.0
    policies: Sequence[str] = ()
    max_switches: int = 0


def draw(seed: str, mix: Mix) -> Scenario:
    """The scenario of a seed."""
    return _Draw(random.Random(seed), mix).scenario()


class _Draw:
    def __init__(self, rng: random.Random, mix: Mix) -> None:
        self._rng = rng
        self._mix = mix
        self._num_talks = 0

    def scenario(self) -> Scenario:
        talks: list[Talk] = []
        agents = self._words(60, 200)
        while len(talks) < self._mix.num_talks:
            talks += self._family(self._pick(self._mix.families), agents)
        talks = sorted(talks[: self._mix.num_talks], key=lambda talk: talk.at_s)
        troubles = self._mix.troubles
        num = self._rng.randint(0, self._mix.max_troubles) if troubles else 0
        disturbances = [self._disturbance(self._pick(troubles)) for _ in range(num)]
        if self._mix.policies:
            num = self._rng.randint(0, self._mix.max_switches)
            disturbances += [self._disturbance(Trouble.SWITCH) for _ in range(num)]
        return Scenario(tuple(talks), tuple(sorted(disturbances, key=lambda one: one.at_s)))

    def _disturbance(self, trouble: Trouble) -> Disturbance:
        rng = self._rng
        at_s = rng.uniform(0, 1.5 * self._mix.span_s)
        for_s = rng.choice((0.0, 0.05, 0.3, 1.0))
        if trouble is not Trouble.SWITCH:
            return Disturbance(at_s, trouble, for_s)
        settings: dict[str, Any] = {"schedule_policy": rng.choice(self._mix.policies)}
        if rng.random() < 0.3:
            settings["preemption"] = {"enabled": False}
        elif rng.random() < 0.2:
            settings["preemption"] = {"host_pool_gib": rng.choice((0.0001, 0.5))}
        if rng.random() < 0.3:
            settings["decode"] = {"max_gap_ms": rng.choice((1.0, 20.0))}
        return Disturbance(at_s, trouble, for_s, settings)

    def _family(self, family: str, agents: tuple[int, ...]) -> list[Talk]:
        """Talks that belong together."""
        rng = self._rng
        at_s = rng.uniform(0, self._mix.span_s)
        if family == "documents":
            share = rng.uniform(0.2, 0.7)
            document = self._words(*(round(share * f * self._mix.max_tokens) for f in (0.5, 1.0)))
            return [
                self._talk(Kind.PLAIN, at_s + rng.uniform(0, 0.3), document, 1)
                for _ in range(rng.randint(2, 4))
            ]
        if family == "agents":
            num = rng.randint(1, 3)
            return [
                self._talk(Kind.PLAIN, at_s + rng.uniform(0, 1), agents, rng.randint(1, 3))
                for _ in range(num)
            ]
        kind = {
            "chats": Kind.CHAT,
            "sessions": Kind.SESSION,
            "streaming sessions": Kind.STREAMING_SESSION,
            "messages": Kind.MESSAGES,
            "batches": Kind.BATCH,
            "singles": Kind.PLAIN,
        }[family]
        num_turns = 1 if family == "singles" else rng.randint(2, 4)
        return [self._talk(kind, at_s, (), num_turns)]

    def _talk(self, kind: Kind, at_s: float, opening: tuple[int, ...], num_turns: int) -> Talk:
        self._num_talks += 1
        left = self._mix.max_tokens - len(opening)
        alone = kind in (Kind.PLAIN, Kind.BATCH)
        each = left if alone else left // num_turns
        turns = tuple(self._turn(kind, each) for _ in range(num_turns))
        # Prefixes of one another are aborted together: so names are of one length.
        return Talk(f"t{self._num_talks:03d}", at_s, kind, opening, turns)

    def _turn(self, kind: Kind, max_tokens: int) -> Turn:
        rng = self._rng
        words = self._words(3, max(4, min(60, max_tokens // 3)))
        longest = max(4, max_tokens - len(words) - 8)
        num_tokens = min(longest, rng.choice((rng.randint(2, 20), rng.randint(20, 80), 200)))
        sessions = kind in (Kind.SESSION, Kind.STREAMING_SESSION)
        grammar = rng.random() < self._mix.grammar and kind is not Kind.MESSAGES
        sampling = self._sampling(num_tokens, grammar)
        plain = kind in (Kind.PLAIN, Kind.CHAT)
        num_samples = rng.choice((2, 3)) if plain and rng.random() < 0.08 else 1
        leave = None
        if rng.random() < self._mix.leaving:
            after_s = rng.choice((0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
            # A sample's id is unknown to clients, and a batch has one connection.
            closes = num_samples > 1 or (kind is not Kind.BATCH and rng.random() < 0.4)
            leave = Leave(closes, after_s * rng.uniform(0.5, 1.5))
        return Turn(
            words=words,
            sampling=sampling,
            pause_s=rng.choice((0.0, 0.0, 0.1, 0.5)),
            stream=rng.random() < 0.45 and kind is not Kind.BATCH,
            num_samples=num_samples,
            logprobs=Logprobs.NONE
            if sessions or kind is Kind.MESSAGES
            else rng.choices(list(Logprobs), (5, 2, 1, 1))[0],
            leave=leave,
            as_text=rng.random() < 0.5 and kind is Kind.PLAIN,
            claims=draw_claims(rng)
            if self._mix.claims and rng.random() < self._mix.claims
            else NO_CLAIMS,
        )

    def _sampling(self, num_tokens: int, grammar: bool) -> dict[str, Any]:
        rng = self._rng
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": num_tokens}
        if grammar:
            how: dict[str, Any] = rng.choice(
                ({"regex": rng.choice(_REGEXES)}, {"json_schema": json.dumps(rng.choice(_SCHEMAS))})
            )
            return sampling | {"max_new_tokens": max(num_tokens, 60)} | how
        if rng.random() < 0.05:
            return sampling | {"temperature": 1.0}
        if rng.random() < 0.5:
            sampling["ignore_eos"] = True
        if rng.random() < 0.15:
            sampling["stop"] = [rng.choice(CHARACTERS) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.1:
            sampling["stop_token_ids"] = rng.sample(
                range(FIRST_ID, VOCAB_SIZE), self._mix.num_stop_ids
            )
        if self._mix.penalties and rng.random() < 0.2:
            sampling |= rng.choice(
                (
                    {"frequency_penalty": 0.8},
                    {"presence_penalty": 0.8},
                    {"repetition_penalty": 1.4},
                    {
                        "min_new_tokens": num_tokens // 2,
                        "ignore_eos": False,
                        "stop_token_ids": list(range(FIRST_ID, VOCAB_SIZE, 8)),
                    },
                )
            )
        return sampling

    def _words(self, least: int, most: int) -> tuple[int, ...]:
        """About one of the few things that a warmed store knows, and like nothing else."""
        num = self._rng.randint(least, max(least, most))
        topic = self._rng.choice((SHORT_PROMPT, LONG_PROMPT))
        own = "".join(self._rng.choices(CHARACTERS, k=4))
        text = f"{own} {topic * (num // len(topic) + 1)}"
        return tuple(FIRST_ID + CHARACTERS.index(character) for character in text[:num])

    def _pick(self, weights: Mapping[Any, float]) -> Any:
        return self._rng.choices(list(weights), list(weights.values()))[0]


def spelled(words: Sequence[int]) -> str:
    """The text of plain characters."""
    return "".join(CHARACTERS[word - FIRST_ID] for word in words)
