"""The events of one episode: clients, their requests, and disturbances.

The same seed gives the same scenario. The server's behaviour also depends on timing, so a failure
may not recur at the first try.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sage_sched.job import LEAST_SLO_MS, LEAST_WEIGHT, MOST_SLO_MS, MOST_WEIGHT
from tests.engine.fuzz.model import CHARACTERS, FIRST_ID, VOCAB_SIZE
from tests.engine.serving import LONG_PROMPT, SHORT_PROMPT

_REGEXES = ("(ab|cd|ef){25,30}", "[a-z]{20,40}", "([0-9]{3}-){8,12}x", "(yes|no)( (yes|no)){10,20}")
# Ways to ask for log probabilities, and how often each comes.
_LOGPROBS: tuple[dict[str, Any], ...] = (
    {},
    {"return_logprob": True},
    {"return_logprob": True, "logprob_start_len": 0},
    {"return_logprob": True, "top_logprobs_num": 2},
)
_LOGPROB_WEIGHTS = (5, 2, 1, 1)
# Clients' claims of importance.
_NAMES = ("", "a", "b", "ü𝄞")
_SLOS_MS = (LEAST_SLO_MS, 30.0, 1000.0, MOST_SLO_MS)
_HINTS: Mapping[str, tuple[Any, ...]] = {
    "urgency": (1, 1, 2, 3, 4, 5),
    "weight": (LEAST_WEIGHT, 0.1, 1, 2, MOST_WEIGHT),
    "ttft_slo_ms": _SLOS_MS,
    "tpot_slo_ms": _SLOS_MS,
    "tenant": _NAMES,
    "session": _NAMES,
}
_HEADERS = {"X-SMG-Priority": ("gold", "std", "batch", "none"), "X-Sage-Tenant": ("a", "b", "c")}
_PRIORITIES = (None, None, -(2**31), -1, 0, 1, 2, 5, 2**31 - 1)


class Kind(Enum):
    """The connection between the turns of a talk. Values are families of single talks."""

    PLAIN = "singles"  # each turn by itself, after the talk's opening
    CHAT = "chats"  # each turn repeats all earlier text, answers included
    SESSION = "sessions"  # SGLang remembers the earlier text
    STREAMING_SESSION = "streaming sessions"  # SGLang keeps its KV, too


@dataclass(frozen=True, slots=True)
class Leave:
    """A client gives a request up: by /abort_request, or by closing the connection."""

    closes: bool
    after_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One question. words: new token ids, all of which are plain characters. custom_params,
    headers, priority: the client's claims of its importance."""

    words: tuple[int, ...]
    sampling: Mapping[str, Any]
    pause_s: float = 0.0  # after the answer before
    stream: bool = False
    logprobs: Mapping[str, Any] = field(default_factory=dict)
    leave: Leave | None = None
    custom_params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    priority: int | None = None


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
    """switches: the disturbances that are SWITCH. troubles: the others. All by time."""

    talks: list[Talk]
    troubles: list[Disturbance]
    switches: list[Disturbance]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The distributions of scenarios. Weights need not sum to 1; shares are of turns.

    max_tokens: of a whole talk, so that it fits into the pool.
    num_stop_ids: the ids of a request that stops at some token. On several ranks it must be 1:
        SGLang's check that ranks agree compares the text of sets, which can differ for equal sets
        of several ids.
    claims: turns whose client claims importance.
    policies: the choices of SWITCH troubles.
    """

    num_talks: int = 24
    span_s: float = 3.0
    max_tokens: int = 500
    families: Mapping[str, float] = field(
        default_factory=lambda: {
            "documents": 3.0, "chats": 1.5, "agents": 1.5, "singles": 3.5,
        }
    )  # fmt: skip
    leaving: float = 0.2
    grammar: float = 0.0
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
        mix, talks = self._mix, list[Talk]()
        agents = self._words(60, 200)
        while len(talks) < mix.num_talks:
            talks += self._family(self._pick(mix.families), agents)
        talks = sorted(talks[: mix.num_talks], key=lambda talk: talk.at_s)
        num = self._rng.randint(0, mix.max_troubles) if mix.troubles else 0
        troubles = [self._disturbance(self._pick(mix.troubles)) for _ in range(num)]
        num = self._rng.randint(0, mix.max_switches) if mix.policies else 0
        switches = [self._disturbance(Trouble.SWITCH, self._settings()) for _ in range(num)]
        return Scenario(talks, *(sorted(one, key=lambda d: d.at_s) for one in (troubles, switches)))

    def _disturbance(self, trouble: Trouble, settings: Mapping[str, Any] = {}) -> Disturbance:
        at_s = self._rng.uniform(0, 1.5 * self._mix.span_s)
        return Disturbance(at_s, trouble, self._rng.choice((0.0, 0.05, 0.3, 1.0)), settings)

    def _settings(self) -> dict[str, Any]:
        """Return the settings of a SWITCH."""
        rng = self._rng
        found: dict[str, Any] = {"schedule_policy": rng.choice(self._mix.policies)}
        if rng.random() < 0.3:
            found["preemption"] = {"enabled": False}
        elif rng.random() < 0.2:
            found["preemption"] = {"host_pool_gib": rng.choice((0.0001, 0.5))}
        if rng.random() < 0.3:
            found["decode"] = {"max_gap_ms": rng.choice((1.0, 20.0))}
        return found

    def _family(self, family: str, agents: tuple[int, ...]) -> list[Talk]:
        """Talks that belong together."""
        rng = self._rng
        at_s = rng.uniform(0, self._mix.span_s)
        if family == "documents":
            tokens = rng.uniform(0.2, 0.7) * self._mix.max_tokens
            document = self._words(round(0.5 * tokens), round(tokens))
            ats_s = [at_s + rng.uniform(0, 0.3) for _ in range(rng.randint(2, 4))]
            return [self._talk(Kind.PLAIN, at_s, document, 1) for at_s in ats_s]
        if family == "agents":
            ats_s = [at_s + rng.uniform(0, 1) for _ in range(rng.randint(1, 3))]
            return [self._talk(Kind.PLAIN, at_s, agents, rng.randint(1, 3)) for at_s in ats_s]
        num_turns = 1 if family == "singles" else rng.randint(2, 4)
        return [self._talk(Kind(family), at_s, (), num_turns)]

    def _talk(self, kind: Kind, at_s: float, opening: tuple[int, ...], num_turns: int) -> Talk:
        self._num_talks += 1
        left = self._mix.max_tokens - len(opening)
        each = left if kind is Kind.PLAIN else left // num_turns
        turns = tuple(self._turn(kind, each) for _ in range(num_turns))
        # An abort also ends requests whose ids begin with its own, so all names have one length.
        return Talk(f"t{self._num_talks:03d}", at_s, kind, opening, turns)

    def _turn(self, kind: Kind, max_tokens: int) -> Turn:
        rng, mix = self._rng, self._mix
        words = self._words(3, max(4, min(60, max_tokens // 3)))
        longest = max(4, max_tokens - len(words) - 8)
        num_tokens = min(longest, rng.choice((rng.randint(2, 20), rng.randint(20, 80), 200)))
        grammar = rng.random() < mix.grammar
        leave, logprobs = None, _LOGPROBS[0]
        if rng.random() < mix.leaving:
            after_s = rng.choice((0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0))
            leave = Leave(rng.random() < 0.4, after_s * rng.uniform(0.5, 1.5))
        if kind in (Kind.PLAIN, Kind.CHAT):
            logprobs = rng.choices(_LOGPROBS, _LOGPROB_WEIGHTS)[0]
        return Turn(
            words=words,
            sampling=self._sampling(num_tokens, grammar),
            pause_s=rng.choice((0.0, 0.0, 0.1, 0.5)),
            stream=rng.random() < 0.45,
            logprobs=logprobs,
            leave=leave,
            **(self._claims() if rng.random() < mix.claims else {}),
        )

    def _sampling(self, num_tokens: int, grammar: bool) -> dict[str, Any]:
        rng = self._rng
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": num_tokens}
        if grammar:
            return sampling | {"regex": rng.choice(_REGEXES), "max_new_tokens": max(num_tokens, 60)}
        if rng.random() < 0.5:
            sampling["ignore_eos"] = True
        if rng.random() < 0.15:
            sampling["stop"] = [rng.choice(CHARACTERS) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.1:
            sampling["stop_token_ids"] = rng.sample(
                range(FIRST_ID, VOCAB_SIZE), self._mix.num_stop_ids
            )
        return sampling

    def _claims(self) -> dict[str, Any]:
        rng = self._rng
        claims: dict[str, Any] = {"priority": rng.choice(_PRIORITIES)}
        for field_name, choices in (("custom_params", _HINTS), ("headers", _HEADERS)):
            some = [name for name in choices if rng.random() < 0.4]
            claims[field_name] = {name: rng.choice(choices[name]) for name in some}
        return claims

    def _words(self, least: int, most: int) -> tuple[int, ...]:
        """Return words about one of the warmed store's few topics, unlike any other."""
        num = self._rng.randint(least, max(least, most))
        topic = self._rng.choice((SHORT_PROMPT, LONG_PROMPT))
        own = "".join(self._rng.choices(CHARACTERS, k=4))
        text = f"{own} {topic * (num // len(topic) + 1)}"
        return tuple(FIRST_ID + CHARACTERS.index(character) for character in text[:num])

    def _pick(self, weights: Mapping[Any, float]) -> Any:
        return self._rng.choices(list(weights), list(weights.values()))[0]
