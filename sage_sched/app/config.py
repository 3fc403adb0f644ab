"""Configuration, parsed once into one frozen object.

docs/settings.md shows the text below each field (tests/checks/pages.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sage_sched.app.address import Address
from sage_sched.app.registry import policy_type, section_of
from sage_sched.fields import (
    MOST,
    ConfigError,
    parse_section,
    require,
    require_known,
    require_within,
)
from sage_sched.gap import FEW_CUTS, MANY_CUTS, Gap
from sage_sched.limits import Limits
from sage_sched.policy import Policy
from sage_sched.routing import ROUTERS
from sage_sched.slo import TRUST, SloClass, SloConfig
from sage_sched.steps import StepTime
from sage_sched.swap_out_bound import SwapOutBound

# The shortest step. Others divide by what a step takes.
_LEAST_STEP_S = 1e-9
ENCODERS = ("static", "minilm")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The history of prompts and answer lengths (SageSched, section 3.1)."""

    path: str = ""
    """Folder of the history. One server or predictor service may use it at a time. Empty:
    `~/.cache/sage-sched/store`."""
    capacity: int = 10_000
    """Records kept. The oldest go first."""
    on_disk: bool = True
    """Write what the server learns. If false, it stays in memory, and an existing folder is only
    read."""

    def __post_init__(self) -> None:
        require(1 <= self.capacity <= 10_000_000, "store.capacity", self.capacity, "1 to 10000000")


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """How similar past prompts become a length distribution.

    deadline_ms is long: a request mostly waits in the queue anyway, and without its prediction it
    loses its place there.
    """

    encoder: str = "static"
    """Turns prompts into vectors. `static` is quick; `minilm` takes 5 to 10 ms of a core and
    suits long documents."""
    threshold: float = 0.0
    """Above 0: SageSched's published rule in place of ours. Past prompts of this cosine or more
    count alike; the paper has 0.8. Use it with `minilm`."""
    deadline_ms: float = 1000.0
    """A request that waits longer for its prediction goes on with the distribution of all
    lengths."""
    service: str = ""
    """Address of a predictor service: a path or `host:port`. The service then has `[store]` and
    the other predictor settings."""
    service_token_file: str = ""
    """File with the token for `host:port`. Empty: the environment variable
    `SAGE_PREDICTOR_TOKEN`."""

    def __post_init__(self) -> None:
        allowed = ", ".join(ENCODERS)
        require(self.encoder in ENCODERS, "predictor.encoder", self.encoder, allowed)
        require_within("predictor.threshold", self.threshold, 0, 1)
        require_within("predictor.deadline_ms", self.deadline_ms, 1e-3, MOST)
        if self.service:
            try:
                Address.parse(self.service)
            except ValueError as error:
                raise ConfigError(f"predictor.service: {error}") from error


@dataclass(frozen=True, slots=True)
class HintsConfig:
    """Whose hints on a request count (sage_sched.job.Hints)."""

    trust: str = "none"
    """Whose hints count: `none`, `header` (gateways), `body` (clients too). Anyone allowed to
    set hints can jump the queue."""

    def __post_init__(self) -> None:
        require(self.trust in TRUST, "hints.trust", self.trust, ", ".join(TRUST))


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """A probe that reads hidden states, and the folder to record them in."""

    file: str = ""
    """Probe for `trail`."""
    record: str = ""
    """Folder to record hidden states in, to train a probe. They leak text; only their owner can
    read them."""
    record_gib: float = 2.0
    """How much of them to keep, in GiB."""

    def __post_init__(self) -> None:
        require_within("probe.record_gib", self.record_gib, 0.1, 1e6)


@dataclass(frozen=True, slots=True)
class UrgencyConfig:
    """How urgent a request is if neither its class nor its client says so."""

    model: str = ""
    """Guesses urgency if neither class nor client gives it: a file by `sage-sched urgency
    train`, or `builtin`."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Which replica serves a request."""

    dispatch: str = ""
    """Chooses the replica if `--dp-size` is above 1: `predicted-cost` or `gorouting`. Empty:
    SGLang chooses."""

    def __post_init__(self) -> None:
        names = ["", *ROUTERS]
        allowed = ", ".join(repr(name) for name in names)
        require(self.dispatch in names, "router.dispatch", self.dispatch, allowed)


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """Running requests that leave, with their KV swapped to host memory."""

    enabled: bool = True
    """Swap running requests out for others, or when memory runs out."""
    host_pool_gib: float = 0.0
    """Host memory for swapped KV per rank, in GiB. 0: a quarter of the host's free memory at
    start, for all its ranks."""

    def __post_init__(self) -> None:
        require_within("preemption.host_pool_gib", self.host_pool_gib, 0, 1e6)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Bounds on the time between two tokens. inf: no bound."""

    max_gap_ms: float = 1000.0
    """Longest time between two tokens while others are prefilled. At least six times what
    cutting a prefill costs; below 1000, twice."""
    max_away_ms: float = 60_000.0
    """Longest time that a swapped-out request waits for its next token. Then it goes first and
    stays for 64 tokens or more."""

    def __post_init__(self) -> None:
        for name, bound_ms in dataclasses.asdict(self).items():
            require(bound_ms >= 1, f"decode.{name}", bound_ms, "1 or more, or inf")

    @property
    def cuts(self) -> int:
        """How often prompts are cut for max_gap_ms at most: often if it is below the default."""
        return MANY_CUTS if self.max_gap_ms < DecodeConfig().max_gap_ms else FEW_CUTS

    def limits(self, policy: Policy) -> Limits:
        """The limits of a server that runs by this policy."""
        return Limits(
            Gap(self.max_gap_ms / 1e3, not policy.has_deadlines, self.cuts),
            SwapOutBound(self.max_away_ms / 1e3),
            sessions=None if policy.retention is None else policy.retention(),
        )


@dataclass(frozen=True, slots=True)
class StepTimeConfig:
    """How long this server's steps take. Without this section the server learns it.

    It begins with the defaults (sage_sched.steps), derived for Qwen3-32B in bfloat16 on one H800
    PCIe from published figures (65.6 GB of weights, 262,144 bytes of KV a token, 2.0 TB/s at 80 %,
    756 TFLOPS at 50 %).
    """

    prefill_base_ms: float = 41.0
    prefill_request_ms: float = 0.0
    prefill_token_ms: float = 0.174
    prefill_pair_ms: float = 0.0
    decode_base_ms: float = 41.0
    decode_request_ms: float = 0.0
    decode_kv_token_ms: float = 0.000164

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            require(0 <= value < 1e6, f"step_time.{name}", value, "0 to 1000000 (ms)")
        step_time = self.step_time()
        for kind, seconds in (
            ("prefill", step_time.prefill_s(1, 1, 0.5)),
            ("decode", step_time.decode_s(1, 1)),
        ):
            takes = f"step_time.{kind}_*_ms: a step of one token"
            require(seconds >= _LEAST_STEP_S, takes, f"{seconds * 1e3:g} ms", "1e-6 ms or more")

    def step_time(self) -> StepTime:
        """The same in seconds. Both classes have their fields in the same order."""
        return StepTime(*(ms / 1e3 for ms in dataclasses.astuple(self)))


def in_ms(step_time: StepTime) -> dict[str, float]:
    """The fields of a StepTimeConfig that says the same, to six digits; not checked."""
    return {
        name.removesuffix("_s") + "_ms": float(f"{seconds * 1e3:.6g}")
        for name, seconds in dataclasses.asdict(step_time).items()
    }


@dataclass(frozen=True, slots=True)
class SageConfig:
    """Everything that --sage-config can set, section by section.

    policy: the parameters of policies, from each `[policy.NAME]` that was given, by NAME.
    step_time: None if the server is to learn them.
    """

    store: StoreConfig = field(default_factory=StoreConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    hints: HintsConfig = field(default_factory=HintsConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    policy: Mapping[str, Any] = field(default_factory=dict, hash=False)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    urgency: UrgencyConfig = field(default_factory=UrgencyConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    step_time: StepTimeConfig | None = None

    @classmethod
    def parse(cls, sections: Mapping[str, Any]) -> Self:
        """From the mapping that a TOML or YAML file holds. Raises ConfigError."""
        require_known(sections, {**_SECTIONS, "slo": None, "policy": None}, "section")
        plain = [name for name in sections if name in _SECTIONS]
        return cls(
            **{name: parse_section(_SECTIONS[name], name, sections[name]) for name in plain},
            slo=_parse_slo(sections.get("slo", {})),
            policy=_parse_policies(sections.get("policy", {})),
        )

    def sections(self) -> dict[str, Any]:
        """The mapping that parse takes."""
        sections = dataclasses.asdict(self)
        return {name: section for name, section in sections.items() if section is not None}


# The plain ones, of which each field is a value.
_SECTIONS: dict[str, Any] = {
    f.name: f.default_factory
    for f in dataclasses.fields(SageConfig)
    if f.name not in ("slo", "policy", "step_time")
} | {"step_time": StepTimeConfig}


def _parse_slo(section: object) -> SloConfig:
    plain = _mapping("section slo", section, "fields with values")
    given = _mapping("slo.classes", plain.pop("classes", {}), "sections [slo.classes.NAME]")
    classes = {
        name: parse_section(SloClass, f"slo.classes.{name}", values)
        for name, values in given.items()
    }
    slo: SloConfig = parse_section(SloConfig, "slo", plain, classes=classes)
    return slo


def _parse_policies(sections: object) -> dict[str, Any]:
    parsed = {}
    for name, values in _mapping("policy", sections, "sections [policy.NAME]").items():
        try:
            policy, section = policy_type(name), section_of(name)
        except ValueError as error:
            raise ConfigError(f"section policy.{name}: {error}") from error
        allowed = f"[policy.{section}], of which it is a variant"
        require(section == name, f"section policy.{name}", values, allowed)
        parsed[name] = parse_section(policy.Parameters, f"policy.{name}", values)
    return parsed


def _mapping(name: str, given: object, allowed: str) -> dict[str, Any]:
    """A copy of a mapping with names. Raises ConfigError if it is none."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {given!r:.80}, allowed: {allowed}")
    for key in given:
        require(isinstance(key, str), f"a name in {name}", key, "a text")
    return dict(given)
