"""Compares a log under several policies, and lists the facts on which the answer rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.whatif.comparison import Comparison, Row, compare
from bench.whatif.engine import OwnServer
from bench.whatif.log import Logged, TrafficLog
from bench.whatif.predictions import Predictions, predictions_of
from bench.whatif.sessions import sessions_of
from bench.whatif.simulation import Simulations, Slo, most_tokens, predicts, requests_of
from bench.workloads.prompts import WorkloadError
from predictor_store.predict.quality import LEAST_TO_TELL
from sage_sched.app.config import SageConfig

# If a log spans fewer mean TTLTs than this, most of it is the beginning or the end of a queue.
_SHORT_TTLTS = 5.0
# Beyond this error in simulating the operator's own policy, the engine must be a different one.
_FAR_OFF = 0.15


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of a log under several policies.

    tables: comparisons, by the assumption about caps. If the log has caps, there is one, named "".
        If not, there are two, the less flattering first.
    notes: the facts on which the answer rests, and cautions, as text.
    multiples: of the log's rate. good: by policy, the share of good requests at each multiple, with
        the caps of the first table.
    """

    tables: dict[str, Comparison]
    notes: list[str]
    multiples: Sequence[float]
    good: dict[str, list[float]]

    @property
    def rows(self) -> list[Row]:
        return next(iter(self.tables.values())).rows


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
    multiples: Sequence[float] = (1.0,),
    slo: Slo | None = None,
) -> Answer:
    """Simulate the log under these policies, with ratios to the first. The other arguments are
    those of `sage-sched whatif`. Raises StoreError, WorkloadError, ValueError."""
    engine = server.engine
    fits = [one for one in log.requests if most_tokens(engine, one) >= one.output_tokens]
    if not fits:
        raise WorkloadError(
            f"no request of the log fits the engine, whose KV pool has {engine.kv_pool_tokens} "
            "tokens"
        )
    sessions = sessions_of(engine, fits)
    requests = [replace(one, arrival_s=one.arrival_s / load) for one in fits]
    if any(map(predicts, policies)):
        predictions = predictions_of(
            requests, engine, config, store=store, gain=server.crps_gain, num_seeds=num_seeds
        )
    else:
        predictions = Predictions(([None] * len(requests),), 1, "none is needed", {})
    caps = {"": cap_tokens} if cap_tokens else _supposed_caps(fits)
    crowds = {
        name: requests_of(engine, requests, sessions.links, tokens) for name, tokens in caps.items()
    }
    first = next(iter(crowds.values()))
    simulations = Simulations(engine, policies, predictions, config)
    num_multiples = sum(multiple != 1 for multiple in multiples)
    with simulations.bar(first, num_tables=len(caps), num_multiples=num_multiples) as bar:
        found = {name: simulations.outcomes(crowd, bar) for name, crowd in crowds.items()}
        as_logged = next(iter(found.values()))
        good = simulations.shares_good(as_logged, first, multiples, slo or Slo(), bar)
    tables = {name: compare(each) for name, each in found.items()}
    span_s = log.last_arrival_s / load
    rate = f", {len(requests) / span_s:.3g} requests/s" if span_s > 0 else ""
    notes = [f"log: {len(requests)} requests of {span_s:.4g} s{rate}"]
    notes += sessions.lines()
    if too_long := len(log.requests) - len(fits):
        notes.append(f"left out: {too_long} requests that are too long for the engine")
    notes += [
        f"engine: {server.description}, KV of {engine.kv_pool_tokens} tokens, "
        f"{engine.max_running_requests} slots",
        f"predictions: {predictions.description}{_quality_note(predictions.quality)}",
    ]
    notes += _cautions(log, policies[0], tables, load)
    return Answer(tables, notes, multiples, good)


def _supposed_caps(requests: Sequence[Logged]) -> dict[str, int | None]:
    """Return the supposed caps by name, for requests whose caps the log does not give. SGLang
    admits by caps, so large ones make its own policies look bad."""
    unknown = [request.output_tokens for request in requests if request.cap_tokens is None]
    if not unknown:
        return {"": None}
    least = max(unknown)
    return {
        f"If max_new_tokens was {least}, the longest answer:": least,
        "If there was none:": None,
    }


def _quality_note(quality: dict[str, Any]) -> str:
    number = quality.get("num_answers", 0)
    if number < LEAST_TO_TELL:
        return f"; {number} answers are too few to judge them by" if quality else ""
    scores = f"CRPS gain {quality['crps_gain']:.2f}, rho {quality['spearman']:.2f}"
    return f"; {scores} over the last {number} answers"


def _cautions(
    log: TrafficLog, own_policy: str, tables: dict[str, Comparison], load: float
) -> list[str]:
    notes = []
    own = [table.rows[0] for table in tables.values()]
    measured_s = log.mean_ttlt_s() if load == 1.0 else None
    if measured_s and all(row.policy == own_policy for row in own):
        off = [row.mean_ttlt_s / measured_s - 1 for row in own]
        simulated = " or ".join(
            f"{row.mean_ttlt_s:.2f} s simulated ({by:+.0%})"
            for row, by in zip(own, off, strict=True)
        )
        notes.append(f"your policy: mean TTLT {measured_s:.2f} s by the log, {simulated}")
        if min(map(abs, off)) > _FAR_OFF:
            notes.append(
                "CAUTION: that is far off. The engine, the policy or the caps are not your "
                "server's (--server, --step-time, --policy, --max-new-tokens), or the log lacks a "
                "part of its traffic"
            )
    if len(tables) > 1:
        number = sum(one.cap_tokens is None for one in log.requests)
        notes.append(
            f"CAUTION: the log lacks max_new_tokens for {number} requests. SGLang admits by it, "
            "and the larger it is, the better our policies look beside SGLang's. So there are two "
            "tables; to get one, give --max-new-tokens"
        )
    mean_ttlt_s = own[0].mean_ttlt_s
    if log.last_arrival_s / load < _SHORT_TTLTS * mean_ttlt_s:
        notes.append(
            f"CAUTION: the log spans only {log.last_arrival_s / load / mean_ttlt_s:.1f} mean "
            "TTLTs. Requests before and after it would change the figures"
        )
    return notes
