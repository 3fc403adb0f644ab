"""Defines classes of requests with their targets, and decides which class a request may claim."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from sage_sched.fields import require
from sage_sched.job import (
    DEFAULT_URGENCY,
    LEAST_SLO_MS,
    LEAST_WEIGHT,
    MAX_NAME_CHARACTERS,
    MOST_SLO_MS,
    MOST_WEIGHT,
    Hints,
)

Trust = Literal["none", "header", "body"]
Weight = Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
SloMs = Annotated[float, Meta(ge=LEAST_SLO_MS)]
# A class's share is counted over this many requests: a new one, and the latest before it.
_WINDOW = 100


@dataclass(frozen=True, slots=True)
class SloClass:
    """A section `[slo.classes.NAME]`."""

    priority: int = 0
    """The `priority` that claims this class; different for each class."""
    weight: Weight = 1.0
    """How much each token of the class counts."""
    ttft_slo_ms: SloMs = math.inf
    """Time to the first token. `inf`: no deadline."""
    tpot_slo_ms: SloMs = math.inf
    """Time for each further token. `inf`: no deadline."""
    min_ttft_slo_ms: Annotated[float, Meta(ge=0, le=MOST_SLO_MS)] = 0.0
    """The tightest TTFT that a client may ask for."""
    min_tpot_slo_ms: Annotated[float, Meta(ge=0, le=MOST_SLO_MS)] = 0.0
    """The tightest TPOT that a client may ask for."""
    max_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Largest share of the latest hundred requests. Further requests get the default class."""
    urgency: Annotated[int, Meta(ge=1, le=5)] = DEFAULT_URGENCY
    """1 (most urgent) to 5, for `urgency` and `qllm`."""
    fair: bool = False
    """Tenants of the class take turns."""

    def check(self, section: str) -> None:
        """Raise ConfigError unless each deadline is at least as long as its floor."""
        for name in ("ttft_slo_ms", "tpot_slo_ms"):
            slo_ms, floor_ms = getattr(self, name), getattr(self, f"min_{name}")
            allowed = f"0 to its {name}, {slo_ms:g} (ms)"
            require(floor_ms <= slo_ms, f"{section}.min_{name}", floor_ms, allowed)


@dataclass(frozen=True, slots=True)
class SloConfig:
    """The section `[slo]`. classes: by NAME."""

    trust: Trust = "none"
    """Where a request's class and batch come from: `none`, `header` (`X-SMG-Priority`, and the
    tenant from `X-Sage-Tenant`) or `body` (`priority`)."""
    default: str = ""
    """Class of requests that name none, or an unknown one."""
    first_token_weight: Weight = 1.0
    """Weight of the first token; later ones have 1. ProServe: mean prompt length divided by mean
    answer length."""
    classes: Mapping[str, SloClass] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        known = ", ".join(self.classes) or "none, as no [slo.classes.NAME] is given"
        require(self.default in ("", *self.classes), "slo.default", self.default, known)
        claimed: dict[int, str] = {}
        for name, given in self.classes.items():
            given.check(f"slo.classes.{name}")
            if name == self.default:
                allowed = "1, as it is the default"
                require(
                    given.max_share == 1, f"slo.classes.{name}.max_share", given.max_share, allowed
                )
            taken = claimed.setdefault(given.priority, name)
            allowed = f"another than that of slo.classes.{taken}"
            require(taken == name, f"slo.classes.{name}.priority", given.priority, allowed)

    @property
    def has_tpot_slo(self) -> bool:
        """Whether any class has a TPOT target."""
        return any(given.tpot_slo_ms < math.inf for given in self.classes.values())


class SloClaims:
    """Decides which class each request belongs to. One instance, in the HTTP process, sees all
    requests."""

    def __init__(self, config: SloConfig) -> None:
        self._config = config
        self._by_priority = {given.priority: name for name, given in config.classes.items()}
        self._latest: deque[str] = deque(maxlen=_WINDOW - 1)
        self._counts: Counter[str] = Counter()
        self._num_demoted = self._num_clamped = 0

    def class_of(self, header: str | None, priority: object, *, only_asks: bool = False) -> str:
        """Return the class of a new request; "" if there are no classes.

        only_asks: the request is not served, and takes no share.

        The setting `trust` decides whether the header X-SMG-Priority or the body's priority counts.
        A request that would exceed its class's share of the latest requests gets the default class.
        """
        config = self._config
        claimed = None
        if config.trust == "header":
            claimed = header if header in config.classes else None
        elif config.trust == "body" and type(priority) is int:
            claimed = self._by_priority.get(priority)
        name = config.default if claimed is None else claimed
        given = config.classes.get(name)
        if given is not None and self._latest.count(name) >= given.max_share * _WINDOW:
            name = config.default
            self._num_demoted += not only_asks
        if not only_asks:
            self._latest.append(name)
            self._counts[name] += 1
        return name

    def hints(self, name: str, given: Hints, priority: object = None, tenant: str = "") -> Hints:
        """Return the hints that count for a request of this class.

        given: the client's hints. Its deadlines count, but not below the floors of the class.
        priority: from the body; if trusted, it sets the urgency unless the class or the client
            does.
        tenant: X-Sage-Tenant, which counts if headers are trusted.
        """
        config = self._config
        if config.trust == "header" and tenant:
            given = replace(given, tenant=tenant[:MAX_NAME_CHARACTERS])
        if config.trust == "body" and type(priority) is int and given.urgency == DEFAULT_URGENCY:
            urgency = min(5, max(1, DEFAULT_URGENCY - priority))
            given = replace(given, urgency=urgency)
        given = replace(given, first_token_weight=config.first_token_weight)
        of_class = config.classes.get(name)
        if of_class is None:
            return given
        ttft_slo_ms = _sooner(given.ttft_slo_ms, of_class.min_ttft_slo_ms, of_class.ttft_slo_ms)
        tpot_slo_ms = _sooner(given.tpot_slo_ms, of_class.min_tpot_slo_ms, of_class.tpot_slo_ms)
        asked = (given.ttft_slo_ms, given.tpot_slo_ms)
        got = (ttft_slo_ms, tpot_slo_ms)
        self._num_clamped += any(a is not None and a != g for a, g in zip(asked, got, strict=True))
        return replace(
            given,
            weight=min(max(given.weight * of_class.weight, LEAST_WEIGHT), MOST_WEIGHT),
            ttft_slo_ms=ttft_slo_ms,
            tpot_slo_ms=tpot_slo_ms,
            slo_class=name,
            urgency=of_class.urgency,
            shares_fairly=of_class.fair,
        )

    def stats(self) -> dict[str, Any]:
        """Return the counters for /server_info.

        num_demoted: requests that claimed a class beyond its share.
        num_clamped: requests that asked for tighter deadlines than their class allows.
        """
        return {
            "num_by_class": {name: n for name, n in self._counts.items() if name},
            "num_demoted": self._num_demoted,
            "num_clamped": self._num_clamped,
        }


def _sooner(asked_ms: float | None, floor_ms: float, of_class_ms: float) -> float | None:
    if asked_ms is not None:
        return max(asked_ms, floor_ms)
    return None if of_class_ms == math.inf else of_class_ms
