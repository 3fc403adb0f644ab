"""Configuration: parsed once, at the edge, into one frozen object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sage_sched.step_time import StepTime

RULES = ("neighbours", "threshold")
COSTS = ("resource-bound", "output", "overall", "measured")


class ConfigError(ValueError):
    """A field is unknown, of the wrong type, or out of range. Names field, value and range."""


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}, allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The history of prompts and answer lengths.

    path: its folder; "" for the default, see predictor_store.store.default_path.
    capacity: records kept, first in first out (SageSched section 3.1: 10,000).
    keep_prompts: store the prompts' text too; otherwise vectors and lengths alone.
    on_disk: write down what the server learns; otherwise the folder is read, if there is one.
    """

    path: str = ""
    capacity: int = 10_000
    keep_prompts: bool = False
    on_disk: bool = True

    def __post_init__(self) -> None:
        _require(1 <= self.capacity <= 10_000_000, "store.capacity", self.capacity, "1 to 10000000")


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """How similar prompts become a length distribution.

    rule: neighbours, weighted by likeness in meaning and in length, or threshold, the rule of
        SageSched section 3.1; see predictor_store.predictor.
    num_nearest: past prompts that a prediction looks at, the most similar ones.
    threshold: of the threshold rule; cosine similarity of a match (SageSched: 0.8).
    min_matches: of the threshold rule; with fewer, warm data is searched too.
    isolate: predict a LoRA adapter's answers from its own and from warm data alone.
    max_atoms: distinct lengths that travel with a request.
    deadline_ms: past it a request goes on with the prior.
    """

    rule: str = "neighbours"
    num_nearest: int = 1024
    threshold: float = 0.8
    min_matches: int = 8
    isolate: bool = False
    max_atoms: int = 64
    deadline_ms: float = 50.0

    def __post_init__(self) -> None:
        _require(self.rule in RULES, "predictor.rule", self.rule, ", ".join(RULES))
        _require(-1 <= self.threshold <= 1, "predictor.threshold", self.threshold, "-1 to 1")
        _require(self.min_matches >= 1, "predictor.min_matches", self.min_matches, "at least 1")
        _require(self.num_nearest >= 1, "predictor.num_nearest", self.num_nearest, "at least 1")
        _require(2 <= self.max_atoms <= 1024, "predictor.max_atoms", self.max_atoms, "2 to 1024")
        _require(self.deadline_ms > 0, "predictor.deadline_ms", self.deadline_ms, "above 0")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """How a length distribution becomes a place in the queue.

    cost: the cost model, see sage_sched.cost.
    bucket_tokens: a running request's index is refreshed every so many tokens (SageSched
        section 4.1: 200).
    refresh: how far a running request's index follows its age where that makes it worse, 0 (not at
        all) to 1 (SageSched).
    aging_pools: while the server works through this many KV pools of tokens (prefill and decode),
        a waiting request's index improves e-fold. Smaller: shorter tails, longer mean.
    admission_quantile: of the length that a request's answer is expected to have, where admission
        asks whether memory will do; smaller: more run at once, and more often too many. 0: SGLang's
        own estimate, a share of the cap that is the same for all.
    preempt_margin: how much better, as a share, a waiting request's index must be than that of a
        running one that is to yield to it.
    trail_limit: of trail; a request no longer yields past this share of its first prediction.
    starvation_pools: of ltr; a request that has waited for so many KV pools of tokens goes first.
    mlfq_quantum_ms: of fastserve; the quantum of the best level.
    boost_pools: of uniboost; 1/g, in KV pools of tokens.
    """

    cost: str = "measured"
    bucket_tokens: int = 200
    refresh: float = 0.3
    aging_pools: float = 2.0
    admission_quantile: float = 0.5
    preempt_margin: float = 0.5
    trail_limit: float = 0.8
    starvation_pools: float = 10.0
    mlfq_quantum_ms: float = 100.0
    boost_pools: float = 1.0

    def __post_init__(self) -> None:
        _require(self.cost in COSTS, "policy.cost", self.cost, ", ".join(COSTS))
        _require(self.bucket_tokens >= 1, "policy.bucket_tokens", self.bucket_tokens, "at least 1")
        _require(0 <= self.refresh <= 1, "policy.refresh", self.refresh, "0 to 1")
        _require(
            self.preempt_margin >= 0, "policy.preempt_margin", self.preempt_margin, "0 or more"
        )
        _require(
            0 <= self.admission_quantile <= 1,
            "policy.admission_quantile", self.admission_quantile, "0 to 1",
        )  # fmt: skip
        for name in (
            "aging_pools", "trail_limit", "starvation_pools", "mlfq_quantum_ms", "boost_pools",
        ):  # fmt: skip
            value = getattr(self, name)
            _require(value > 0, f"policy.{name}", value, "above 0")


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """Running requests that yield, with their KV swapped to host memory.

    enabled: whether they do, under a policy that preempts, on a server that can do it.
    max_yields: how often one request does at most.
    host_pool_gib: host memory for their KV, per scheduler rank.
    swap_only: never leave KV behind to be computed again, not even where that is cheaper or the
        host memory is full. Computed again, KV is rounded otherwise, and so may sampled text be.
    """

    enabled: bool = True
    max_yields: int = 4
    host_pool_gib: float = 8.0
    swap_only: bool = True

    def __post_init__(self) -> None:
        _require(self.max_yields >= 1, "preemption.max_yields", self.max_yields, "at least 1")
        pool_gib = self.host_pool_gib
        _require(0 < pool_gib < 1e6, "preemption.host_pool_gib", pool_gib, "above 0")


@dataclass(frozen=True, slots=True)
class StepTimeConfig:
    """How long this server's steps take, for the measured cost; see sage_sched.step_time.

    `sage-sched bench fit` measures and writes them. The defaults are derived for Qwen3-32B in
    bfloat16 on one H800 PCIe from published figures (65.6 GB of weights, 262,144 bytes of KV a
    token, 2.0 TB/s at 80 %, 756 TFLOPS at 50 %); an order needs their proportions only, and those
    are alike on most GPUs.
    """

    prefill_base_ms: float = 41.0
    prefill_request_ms: float = 0.0
    prefill_token_ms: float = 0.174
    prefill_pair_ms: float = 0.0
    decode_base_ms: float = 41.0
    decode_request_ms: float = 0.0
    decode_kv_token_ms: float = 0.000164

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            _require(0 <= value < 1e6, f"step_time.{f.name}", value, "0 to 1000000 (ms)")

    def step_time(self) -> StepTime:
        """The same in seconds."""
        return StepTime(
            **{
                f.name.removesuffix("_ms") + "_s": getattr(self, f.name) / 1e3
                for f in dataclasses.fields(self)
            }
        )


@dataclass(frozen=True, slots=True)
class SageConfig:
    """Everything that --sage-config can set, section by section."""

    store: StoreConfig = field(default_factory=StoreConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    step_time: StepTimeConfig = field(default_factory=StepTimeConfig)

    @classmethod
    def parse(cls, sections: Mapping[str, Any]) -> Self:
        """From the mapping that a TOML or YAML file holds. Raises ConfigError."""
        _require_known(sections, _SECTIONS, "section")
        return cls(
            **{
                name: _parse_section(_SECTIONS[name], name, values)
                for name, values in sections.items()
            }
        )


_SECTIONS: dict[str, type[Any]] = {
    "store": StoreConfig,
    "predictor": PredictorConfig,
    "policy": PolicyConfig,
    "preemption": PreemptionConfig,
    "step_time": StepTimeConfig,
}


def _require_known(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}, allowed: {', '.join(known)}")


def _parse_section(section: type[Any], name: str, values: object) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"section {name} is {values!r}, allowed: fields with values")
    types = {f.name: type(f.default) for f in dataclasses.fields(section)}
    _require_known(values, types, f"field of section {name}")
    parsed = {}
    for key, value in values.items():
        wanted: type[Any] = types[key]
        # A bool is an int in Python; an int where a float is wanted is fine.
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        _require(fits, f"{name}.{key}", value, f"a value of type {wanted.__name__}")
        parsed[key] = wanted(value)
    return section(**parsed)
