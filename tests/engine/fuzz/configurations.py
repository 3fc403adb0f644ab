"""The servers that are fuzzed, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from bench.engines.server.policy_server import CPU_ENGINE_FLAGS, CPU_ENV
from tests.checks.exactness import STRICT, TWO_RANKS
from tests.engine.fuzz.scenario import Mix, Trouble
from tests.engine.kinds import SETTINGS

# Otherwise an idle server takes a core from the other one.
_FLAGS = (*CPU_ENGINE_FLAGS, "--log-level-http", "warning", "--sleep-on-idle")
_CHECKS = {**CPU_ENV, **STRICT, "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
_RESTLESS = (SETTINGS / "fuzzed.toml").read_text()
_COMPUTED_AGAIN = _RESTLESS.replace("enabled = true", "enabled = true\nhost_pool_gib = 0.0003")
_CLAIMED = _RESTLESS + (SETTINGS / "fuzzed_claims.toml").read_text()
# Flags of the fuzzed server.
_COUNTED = ("--enable-metrics",)
_CALM_TROUBLES = {Trouble.FLUSH: 1.0, Trouble.ABORT_ALL: 0.5}
_ALL_TROUBLES = {one: 1.0 for one in Trouble if one not in (Trouble.LOOK, Trouble.SWITCH)}
# For servers whose clients claim importance, and whose policy is switched meanwhile.
_POLICIES = (
    "qllm", "proserve", "urgency", "sage", "fastserve", "uniboost", "ssjf", "ltr", "fcfs-fill",
    "fcfs", "lpm", "lof", "dfs-weight",
)  # fmt: skip
# SGLang's dfs-weight ends a server with streaming sessions.
_POLICIES_OF_SESSIONS = _POLICIES[:-1]
_CLAIMING = Mix(
    max_tokens=400, troubles=_ALL_TROUBLES | {Trouble.LOOK: 3.0}, max_troubles=3, claims=0.7,
    policies=_POLICIES, max_switches=4,
)  # fmt: skip
# Other configurations try shared prompts.
_STRUCTURED = Mix(
    max_tokens=400, grammar=0.7, leaving=0.1,
    families={"singles": 5.0, "chats": 1.0},
)  # fmt: skip
_WITH_SESSIONS = {
    "documents": 2.0, "chats": 1.0, "singles": 2.0, "sessions": 2.0, "streaming sessions": 3.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A server, and the requests that it gets.

    flags: the undisturbed server has them too, because they may change how numbers are rounded, or
        which tokens a grammar allows.
    pool_tokens, num_slots: a starved server's.
    starved_flags: of the fuzzed server alone.
    settings: its --sage-config; "" for a stock policy.
    """

    name: str
    policy: str = "fastserve"
    flags: tuple[str, ...] = ()
    pool_tokens: int = 1200
    num_slots: int = 6
    starved_flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    settings: str = _RESTLESS
    mix: Mix = field(default_factory=Mix)

    def fuzzed_flags(self) -> list[str]:
        pool = ("--max-total-tokens", str(self.pool_tokens))
        slots = ("--max-running-requests", str(self.num_slots))
        policy = ("--schedule-policy", self.policy)
        return [*_FLAGS, *self.flags, *pool, *slots, *policy, *self.starved_flags]

    def calm_flags(self) -> list[str]:
        """Flags of a stock server with room for all requests."""
        return [*_FLAGS, *self.flags, "--max-total-tokens", "16384", "--max-running-requests", "24"]

    def environment(self) -> dict[str, str]:
        return {**_CHECKS, **self.env}


_CHUNKED = ("--chunked-prefill-size", "64")
_MIXED = (*_CHUNKED, "--enable-mixed-chunk")
_WHOLE = ("--chunked-prefill-size", "-1")
_PAGED = ("--page-size", "16")
_CALM = Mix(max_tokens=400, troubles=_CALM_TROUBLES)
_LOOKED_AT = _CALM_TROUBLES | {Trouble.LOOK: 1.0}
# A server that an admin watches, and whose clients claim importance.
_claimed = partial(
    Configuration, pool_tokens=900, starved_flags=_COUNTED, settings=_CLAIMED, mix=_CLAIMING
)
_LIST = [
    Configuration(
        name="documents", pool_tokens=2000, num_slots=8,
        mix=Mix(
            max_tokens=900, leaving=0.1,
            families={"documents": 5.0, "chats": 1.0, "agents": 2.0, "singles": 1.0},
        ),
    ),
    Configuration(
        name="sage", policy="sage", pool_tokens=1000,
        mix=Mix(troubles=_ALL_TROUBLES, max_troubles=4),
    ),
    *(
        Configuration(
            name=name, flags=("--grammar-backend", name), pool_tokens=900, mix=_STRUCTURED
        )
        for name in ("llguidance", "outlines")
    ),
    Configuration(
        name="chunked", policy="sage", flags=("--chunked-prefill-size", "32", *_PAGED),
        pool_tokens=1280, num_slots=8, mix=replace(_CALM, max_tokens=600),
    ),
    Configuration(name="fickle", policy="fickle", flags=_CHUNKED, pool_tokens=900, mix=_CALM),
    Configuration(
        name="fickle-mixed", policy="fickle", flags=(*_MIXED, *_PAGED), pool_tokens=1280, mix=_CALM
    ),
    _claimed(name="urgency", policy="urgency", flags=_CHUNKED),
    _claimed(
        name="proserve", policy="proserve", flags=(*_MIXED, *_PAGED), pool_tokens=1280,
        mix=replace(_CLAIMING, max_tokens=500),
    ),
    _claimed(
        name="qllm", policy="qllm", flags=(*_WHOLE, "--disable-overlap-schedule"),
        settings=_CLAIMED + "[policy.qllm]\nlevel_pools = 0.2\n",
    ),
    _claimed(
        name="two-ranks", policy="picky", flags=("--tp-size", "2"), env=TWO_RANKS,
        mix=replace(_CLAIMING, num_talks=20, num_stop_ids=1),
    ),
    _claimed(
        name="two-replicas", policy="sage", pool_tokens=700,
        starved_flags=("--dp-size", "2", *_COUNTED), env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        mix=replace(_CLAIMING, max_tokens=350, troubles=_LOOKED_AT),
    ),
    _claimed(
        name="sessions", pool_tokens=2000, num_slots=8,
        starved_flags=("--enable-streaming-session", *_WHOLE, *_COUNTED),
        mix=replace(
            _CLAIMING, families=_WITH_SESSIONS, policies=_POLICIES_OF_SESSIONS, max_tokens=450,
            num_talks=20, troubles=_LOOKED_AT,
        ),
    ),
    # Everything at once. There are few sessions, because open sessions may hold all slots.
    _claimed(
        name="chaos", flags=(*_MIXED, "--disable-overlap-schedule"), pool_tokens=1000,
        starved_flags=("--enable-streaming-session", "--enable-session-radix-cache", *_COUNTED),
        mix=replace(
            _CLAIMING, policies=_POLICIES_OF_SESSIONS, grammar=0.05, max_switches=6,
            families=_WITH_SESSIONS | {"streaming sessions": 1.0, "agents": 1.0},
        ),
    ),
    Configuration(
        name="computed-again", policy="sage", settings=_COMPUTED_AGAIN, pool_tokens=900,
        mix=Mix(max_tokens=400, troubles=_ALL_TROUBLES),
    ),
    # SGLang itself under the same conditions: failures here are not ours.
    Configuration(
        name="stock", policy="fcfs", settings="", pool_tokens=1000,
        mix=Mix(troubles=_ALL_TROUBLES, grammar=0.1, max_troubles=4),
    ),
]  # fmt: skip
CONFIGURATIONS: Mapping[str, Configuration] = {one.name: one for one in _LIST}
