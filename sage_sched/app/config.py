"""Configuration, parsed once into one frozen object."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, get_args

from msgspec import Meta

from sage_sched.app.address import Address
from sage_sched.app.registry import policy_type, section_of
from sage_sched.fair_shares import FairShares
from sage_sched.fields import (
    MOST,
    ConfigError,
    Share,
    hints_of,
    mapping,
    parse,
    parse_section,
    require,
    require_known,
)
from sage_sched.gaps import Gap, SwapOutBound
from sage_sched.limits import Limits
from sage_sched.overload import Overload, OverloadConfig
from sage_sched.policy import Policy
from sage_sched.slo import SloConfig, Trust
from sage_sched.starvation_bound import StarvationBound
from sage_sched.steps import FEW_CUTS, MANY_CUTS, StepTime

# The shortest step that can be set. Other code divides by step times.
_LEAST_STEP_S = 1e-9
Encoder = Literal["static", "minilm"]
ENCODERS: tuple[Encoder, ...] = get_args(Encoder)
StepMs = Annotated[float, Meta(ge=0, lt=1e6)]


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The history of prompts and answer lengths (SageSched, section 3.1)."""

    path: str = ""
    """Folder of the history. One server or predictor service may use it at a time. Empty:
    `~/.cache/sage-sched/store`."""
    capacity: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Records kept. The oldest go first."""
    on_disk: bool = True
    """Write records to disk. If false, new ones stay in memory, and an existing folder is only
    read."""


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """The prediction of a length distribution from similar past prompts.

    deadline_ms is long, because most requests wait in the queue anyway, and a request without its
    prediction would lose its place there.
    """

    encoder: Encoder = "static"
    """Turns prompts into vectors. `static` is fast; `minilm`, for long documents, takes 5 to 10 ms
    of a core."""
    threshold: Share = 0.0
    """Above 0: the rule of SageSched's paper. Past prompts have equal weight if their cosine to the
    new one reaches this (paper: 0.8, `minilm`), and none otherwise."""
    deadline_ms: Annotated[float, Meta(ge=1e-3, le=MOST)] = 1000.0
    """A request that waits longer for its prediction goes on with the distribution of all
    lengths."""
    service: str = ""
    """Address of a predictor service: a path or `host:port`. `[store]` and the other predictor
    settings are then set there."""
    service_token_file: str = ""
    """File with the token for `host:port`. Empty: the environment variable
    `SAGE_PREDICTOR_TOKEN`."""

    def __post_init__(self) -> None:
        if self.service:
            try:
                Address.parse(self.service)
            except ValueError as error:
                raise ConfigError(f"predictor.service: {error}") from error


@dataclass(frozen=True, slots=True)
class HintsConfig:
    """The trusted hints on a request (sage_sched.job.Hints)."""

    trust: Trust = "none"
    """Trusted hints: `none`, `header` (of gateways) or `body` (of clients too). Anyone allowed to
    set hints can jump the queue."""


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """A probe that reads hidden states, and the folder to record them in."""

    file: str = ""
    """File of the probe for `trail`."""
    record: str = ""
    """Folder to record hidden states in, for training a probe. They leak text; only their owner can
    read them."""
    record_gib: Annotated[float, Meta(ge=0.1, le=1e6)] = 2.0
    """Hidden states to keep, in GiB."""

    @property
    def is_on(self) -> bool:
        """Whether hidden states are read."""
        return bool(self.file or self.record)


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """Preemption of running requests, whose KV is swapped to host memory."""

    enabled: bool = True
    """Swap running requests out for others, or when memory runs out."""
    host_pool_gib: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Host memory for swapped KV per rank. 0: all ranks share a quarter of the host's free
    memory, up to 16 GiB each."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Bounds on the time between two tokens. inf: no bound."""

    max_gap_ms: Annotated[float, Meta(ge=1)] = 1000.0
    """Longest time between two tokens while others are prefilled. It is exceeded if prefills would
    have to be cut too finely."""
    max_swapped_ms: Annotated[float, Meta(ge=1)] = 40_000.0
    """Longest time that a swapped-out request waits. Then it goes first, and runs for at least 64
    tokens. No request is swapped out for a new one if such turns would take a third of the time.
    `makespan` ignores it."""

    @property
    def cuts(self) -> int:
        """Return how often prefills may be cut to keep max_gap_ms: more often if it is below its
        default."""
        return MANY_CUTS if self.max_gap_ms < DecodeConfig().max_gap_ms else FEW_CUTS


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Output of the HTTP server in addition to answers."""

    comment_every_ms: Annotated[float, Meta(ge=100)] = 15_000.0
    """A stream that is silent this long gets a comment, which clients ignore, so that no proxy
    closes it. `inf`: none."""


@dataclass(frozen=True, slots=True)
class StepTimeConfig:
    """The duration of this server's steps. Without this section the server learns it.

    The server begins with the defaults, derived for Qwen3-32B in bfloat16 on one H800
    PCIe from published figures (65.6 GB of weights, 262,144 bytes of KV a token, 2.0 TB/s at 80 %,
    756 TFLOPS at 50 %).
    """

    prefill_base_ms: StepMs = 41.0
    """Fixed time of a prefill step. Without `[step_time]` the server learns all of these."""
    prefill_request_ms: StepMs = 0.0
    """Time per request of a prefill step."""
    prefill_token_ms: StepMs = 0.174
    """Time per computed token."""
    prefill_pair_ms: StepMs = 0.0
    """Time per pair of a computed token and a token that it attends to."""
    decode_base_ms: StepMs = 41.0
    """Fixed time of a decode step."""
    decode_request_ms: StepMs = 0.0
    """Time per request of a decode step."""
    decode_kv_token_ms: StepMs = 0.000164
    """Time per KV token of its requests."""

    def __post_init__(self) -> None:
        step_time = self.step_time()
        for kind, seconds in (
            ("prefill", step_time.prefill_s(1, 1, 0.5)),
            ("decode", step_time.decode_s(1, 1)),
        ):
            takes = f"step_time.{kind}_*_ms: a step of one token"
            require(seconds >= _LEAST_STEP_S, takes, f"{seconds * 1e3:g} ms", "1e-6 ms or more")

    def step_time(self) -> StepTime:
        """Return the same times in seconds. Both classes have their fields in the same order."""
        return StepTime(*(ms / 1e3 for ms in dataclasses.astuple(self)))


def in_ms(step_time: StepTime) -> dict[str, float]:
    """Return these step times as the fields of a StepTimeConfig, to six digits, unchecked."""
    return {
        name.removesuffix("_s") + "_ms": float(f"{seconds * 1e3:.6g}")
        for name, seconds in dataclasses.asdict(step_time).items()
    }


@dataclass(frozen=True, slots=True)
class SageConfig:
    """Everything that --sage-config can set, section by section.

    policy: the parameters of policies, from each `[policy.NAME]` that was given, by NAME.
    step_time: None if the server is to learn its step times.
    """

    store: StoreConfig = field(default_factory=StoreConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    hints: HintsConfig = field(default_factory=HintsConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    policy: Mapping[str, Any] = field(default_factory=dict, hash=False)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    step_time: StepTimeConfig | None = None

    @classmethod
    def parse(cls, sections: Mapping[str, Any]) -> Self:
        """Parse the mapping that a TOML or YAML file holds. Raises ConfigError."""
        hints = hints_of(cls)
        require_known(sections, hints, "section")
        parsed: dict[str, Any] = {
            name: _policies(values) if name == "policy" else parse(name, hints[name], values)
            for name, values in sections.items()
        }
        return cls(**parsed)

    def limits(self, policy: Policy) -> Limits:
        """Return the limits of a server that runs this policy. Raises ConfigError if it cannot keep
        them."""
        require_predicts_waits(self.overload, type(policy), type(policy).__name__)
        decode, traits = self.decode, policy.traits
        classes_ms = {
            name: (given.ttft_slo_ms, given.tpot_slo_ms) for name, given in self.slo.classes.items()
        }
        return Limits(
            [
                StarvationBound(traits.regret),
                Gap(decode.max_gap_ms / 1e3, not traits.has_deadlines, decode.cuts),
                SwapOutBound(decode.max_swapped_ms / 1e3 if traits.bounds_time_away else math.inf),
            ],
            fair_shares=FairShares(),
            overload=Overload(self.overload, classes_ms),
            sessions=None if traits.retention is None else traits.retention(),
        )

    def sections(self) -> dict[str, Any]:
        """Return these settings as a mapping that parse accepts."""
        sections = dataclasses.asdict(self)
        return {name: section for name, section in sections.items() if section is not None}


def require_predicts_waits(overload: OverloadConfig, policy: type[Policy], name: str) -> None:
    """Raise ConfigError if overload protection would predict waits in another order than the
    policy's."""
    allowed = f"false under schedule_policy {name}, in whose order no waits are predicted"
    require(policy.traits.predicts_waits or not overload.enabled, "overload.enabled", True, allowed)


def _policies(sections: object) -> dict[str, Any]:
    parsed = {}
    for name, values in mapping("policy", sections, "sections [policy.NAME]").items():
        try:
            policy, section = policy_type(name), section_of(name)
        except ValueError as error:
            raise ConfigError(f"section policy.{name}: {error}") from error
        allowed = f"[policy.{section}], of which it is a variant"
        require(section == name, f"section policy.{name}", values, allowed)
        parsed[name] = parse_section(policy.Parameters, f"policy.{name}", values)
    return parsed
