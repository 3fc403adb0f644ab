"""A log under several policies, compared, and what the answer rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.whatif.comparison import Row, compare
from bench.whatif.engine import OwnServer
from bench.whatif.log import TrafficLog, faster
from bench.whatif.simulation import most_tokens, outcomes, predicts, requests_of
from bench.whatif.told import Told, told_of
from bench.workload.prompts import WorkloadError
from sage_sched.config import SageConfig

# A log of fewer mean TTLTs than that is mostly the beginning of a queue, or its end.
_SHORT_TTLTS = 5.0
# The simulation of one's own policy is off by so much: something of the engine is not as told.
_FAR_OFF = 0.15


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it. notes: what it rests on, and what to be careful about, for people."""

    rows: list[Row]
    notes: list[str]


def answer_of(
    log: TrafficLog,
    server: OwnServer,
    policies: Sequence[str],
    config: SageConfig,
    *,
    load: float = 1.0,
    cap_tokens: int | None = None,
    store: Path | None = None,
    num_seeds: int = 3,
) -> Answer:
    """The log under these policies, ratios to the first; see configure. Raises StoreError,
    WorkloadError, ValueError."""
    engine = server.engine
    fits = [one for one in log.requests if most_tokens(engine, one) >= one.output_tokens]
    if not fits:
        raise WorkloadError(
            f"no request of the log fits the engine, whose KV pool has {engine.kv_pool_tokens} "
            "tokens"
        )
    requests = faster(fits, load)
    if any(map(predicts, policies)):
        told = told_of(
            requests, engine, config, store=store, gain=server.crps_gain, num_seeds=num_seeds
        )
    else:
        told = Told(([None] * len(requests),), 1, "none is needed", {})
    simulated = requests_of(engine, requests, cap_tokens)
    rows = compare(outcomes(engine, policies, simulated, told, config))
    notes = [f"log: {log.description}; {len(requests)} requests of {log.arrivals_s / load:.0f} s"]
    if log.num_unusable:
        notes.append(f"left out: {log.num_unusable} rows, the first: {log.first_unusable}")
    if too_long := len(log.requests) - len(fits):
        notes.append(f"left out: {too_long} requests that are too long for the engine")
    notes += [
        f"engine: {server.description}, KV of {engine.kv_pool_tokens} tokens, "
        f"{engine.max_running_requests} slots",
        f"predictions: {told.description}{_quality_note(told.quality)}",
    ]
    notes += _cautions(log, rows[0], load, num_without_cap=_num_without_cap(log, cap_tokens))
    return Answer(rows, notes)


def _num_without_cap(log: TrafficLog, cap_tokens: int | None) -> int:
    return 0 if cap_tokens else sum(one.cap_tokens is None for one in log.requests)


def _quality_note(quality: dict[str, Any]) -> str:
    if not quality.get("num_answers"):
        return ""
    return f"; CRPS gain {quality['crps_gain']:.2f}, rho {quality['spearman']:.2f} over the last"


def _cautions(log: TrafficLog, own: Row, load: float, num_without_cap: int) -> list[str]:
    notes = []
    measured_s = log.mean_ttlt_s() if load == 1.0 else None
    if measured_s:
        off = own.mean_ttlt_s / measured_s - 1
        notes.append(
            f"your policy: mean TTLT {measured_s:.2f} s by the log, {own.mean_ttlt_s:.2f} s "
            f"simulated ({off:+.0%})"
        )
        if abs(off) > _FAR_OFF:
            notes.append(
                "CAUTION: that is far off. Engine, policy or caps are not as your server's "
                "(--server, --step-time, --policy, --max-new-tokens), or the log is not all of its "
                "traffic"
            )
    if num_without_cap:
        notes.append(
            f"caps: the log does not say max_new_tokens of {num_without_cap} requests, taken for "
            "none (--max-new-tokens)"
        )
    if log.arrivals_s / load < _SHORT_TTLTS * own.mean_ttlt_s:
        notes.append(
            f"CAUTION: the log is short, {log.arrivals_s / load / own.mean_ttlt_s:.1f} mean TTLTs: "
            "what comes before and after it counts too"
        )
    return notes
