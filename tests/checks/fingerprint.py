"""Detects changed decisions: `python -m tests.checks.fingerprint` records them anew.

It simulates every policy in a few regimes and under random traffic, every router, and engines that
prefill or decode, and keeps a hash of each result. The same code gives the same hashes on any x86
machine with Python 3.11. A refactoring must keep them. After a deliberate change, record them anew
and say in the commit why they changed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.policies import deadline_rivals, programs, variants
from bench.policies.routers import ROUTERS, router_named
from bench.policies.srpt_oracle import ORACLE
from bench.simulator.apart import Apart
from bench.simulator.cluster import Cluster
from bench.simulator.host import NO_HOST
from bench.simulator.presets import PRESETS, Engine
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.simulator.stock import STOCK
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names, policy_type
from sage_sched.job import NO_HINTS, Hints
from sage_sched.policy import Policy
from tests.bench.simulator import fuzz
from tests.bench.simulator.traffic import known, request

RECORDED = Path(__file__).with_name("fingerprints.json")
_NUM_REQUESTS = 200
_CAP_TOKENS = 2048
_SEEDS = range(3)
_SETTINGS: dict[str, dict[str, Any]] = {
    "overload": {"overload": {"enabled": True, "max_ttft_ms": 2000.0, "max_tpot_ms": 60.0}},
}

# Without the host's costs, which change no decision but only times.
_H800, _H800_80GB = (
    replace(PRESETS[name], host=NO_HOST) for name in ("h800-qwen3-32b", "h800-80gb-qwen3-32b")
)

# Each makes something scarce: KV, slots, KV in pages, prefill with short chunks, or time.
_REGIMES: dict[str, tuple[Engine, float]] = {
    "kv": (_H800_80GB, 6.0),
    "tenants": (replace(_H800, max_running_requests=24), 3.0),
    "deadlines": (replace(_H800_80GB, page_size=16, kv_pool_tokens=12_000), 4.0),
    "sessions": (
        replace(_H800_80GB, chunked_prefill_size=256, kv_pool_tokens=20_000), 6.0
    ),
    "overload": (replace(_H800, max_running_requests=24), 5.0),
}  # fmt: skip
# For some policies alone: classes of deadlines, and prefills in slices.
_OTHERS: dict[str, tuple[Engine, float]] = {
    "classes": (replace(_H800_80GB, kv_pool_tokens=12_000, mixed_chunk=True), 6.0),
    "slices": (replace(_H800, slices=10, slice_overhead_s=0.002), 6.0),
}
# Simulated only: with classes of deadlines, and with sessions.
_OF_CLASSES = {**deadline_rivals.RIVALS, **variants.PARTS}
_RIVALS: dict[str, type[Policy]] = {**_OF_CLASSES, **programs.RIVALS}
# The regime and the age of the reports that routers get.
_CLUSTERS = {"new": ("deadlines", 0.01), "old": ("sessions", 4.0)}


def cases() -> dict[str, Callable[[], Result]]:
    """Return the simulations by name."""
    names = sorted({*policy_names(), *STOCK, ORACLE, "fcfs@conservativeness=0.3"})
    return {
        **{f"{name} {regime}": partial(_in_regime, name, regime)
           for regime in _REGIMES for name in names
           if regime != "overload" or _predicts_waits(name)},
        **{f"{name} classes": partial(_in_regime, name, "classes") for name in _OF_CLASSES},
        "qllm slices": partial(_in_regime, "qllm", "slices"),
        **{f"{name} sessions": partial(_in_regime, name, "sessions") for name in programs.RIVALS},
        **{f"{name} {reports} reports": partial(_in_cluster, name, reports)
           for reports in _CLUSTERS for name in ROUTERS},
        **{f"{name} apart {num_nodes}": partial(_apart, name, num_nodes)
           for name, num_nodes in (("fcfs", 1), ("fcfs-fill", 1), ("sage", 1), ("sage", 2))},
        **{f"{name} fuzz {seed}": partial(_in_fuzz, name, seed)
           for name in policy_names() for seed in _SEEDS},
    }  # fmt: skip


def digest(result: Result) -> str:
    """Return a hash of all of a result."""
    hashed = hashlib.sha256()
    for field in fields(result):
        value = getattr(result, field.name)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        elif isinstance(value, Counter):
            value = sorted(value.items(), key=str)
        hashed.update(repr(value).encode())
    return hashed.hexdigest()[:16]


def main() -> None:
    """Write the file, with a line for each policy or router, and name the cases that changed."""
    known = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    now = {name: digest(run()) for name, run in tqdm(cases().items(), unit="run")}
    by_policy = groupby(sorted(now), key=lambda name: name.split()[0])
    lines = [json.dumps({name: now[name] for name in names})[1:-1] for _, names in by_policy]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    changed = [name for name in now if known.get(name) != now[name]]
    print(f"{len(changed)} of {len(now)} changed", *changed, sep="\n")


def _predicts_waits(name: str) -> bool:
    ours = policy_type(name).traits.predicts_waits if name in policy_names() else True
    return name != ORACLE and ours


def _in_fuzz(policy: str, seed: int) -> Result:
    return fuzz.run(fuzz.draw(seed, policy))


def _in_regime(policy: str, regime: str) -> Result:
    engine, rate = (_REGIMES | _OTHERS)[regime]
    config = SageConfig.parse(_SETTINGS.get(regime, {}))
    rival = _RIVALS.get(policy)
    chosen = rival(rival.Parameters(), engine.server_facts()) if rival else policy
    return simulate(engine, chosen, config, _requests(rate, regime))


def _in_cluster(router: str, reports: str) -> Result:
    regime, report_s = _CLUSTERS[reports]
    engine, rate = _REGIMES[regime]
    requests = _requests(3 * rate, regime)
    cluster = Cluster(engine, "sage", SageConfig(), requests, Options(), 3)
    return cluster.serve(router_named(router), report_s)


def _apart(policy: str, num_nodes: int) -> Result:
    engine, rate = _REGIMES["kv"]
    requests = _requests(rate * num_nodes, "kv")
    apart = Apart(engine, policy, SageConfig(), requests, Options(), num_nodes)
    return apart.serve(router_named("gorouting"))


def _requests(rate: float, regime: str) -> list[SimRequest]:
    """Return requests whose prompts predict half of their lengths. A tenth has no prediction."""
    rng = np.random.default_rng(0)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, _NUM_REQUESTS))
    requests: list[SimRequest] = []
    for number, arrival_s in enumerate(arrivals_s.tolist()):
        level = rng.normal(5.0, 1.0)
        samples = np.exp(rng.normal(level, 0.6, 48)).astype(np.int64)
        predicted = known(*np.clip(samples, 1, _CAP_TOKENS))
        asked = request(
            arrival_s,
            int(np.clip(np.exp(rng.normal(5.5, 1.2)), 4, 6000)),
            int(np.clip(np.exp(rng.normal(level, 0.6)), 1, _CAP_TOKENS)),
            _CAP_TOKENS, class_name="", hints=_hints(regime, number),
            distribution=None if number % 10 == 9 else predicted,
        )  # fmt: skip
        turn_of = number - 40
        if regime == "sessions" and turn_of >= 0 and number % 4:
            asked = _next_turn(asked, turn_of, requests[turn_of])
        requests.append(asked)
    return requests


def _hints(regime: str, number: int) -> Hints:
    if regime == "tenants":
        weight = 1.0 + (number % 2)
        return Hints(tenant=str(number % 7 % 3), shares_fairly=True, weight=weight)
    if regime == "classes":
        name, weight, ttft_ms = ("high", 2.0, 5000.0) if number % 2 else ("low", 1.0, 1000.0)
        return Hints(weight=weight, ttft_slo_ms=ttft_ms, tpot_slo_ms=100.0, slo_class=name)
    if regime == "slices":
        return Hints(urgency=1 + number % 5)
    if regime == "deadlines" and number % 3:
        return Hints(ttft_slo_ms=800.0, tpot_slo_ms=60.0, urgency=1 + number % 5)
    if regime == "sessions":
        return Hints(session=str(number % 40), pause_ms=500.0, ends_session=number >= 160)
    return NO_HINTS


def _next_turn(asked: SimRequest, turn_of: int, before: SimRequest) -> SimRequest:
    """Return the request as the turn after `before`. Its prompt begins with that of `before`."""
    told = before.spans or ((turn_of, 0, before.input_tokens),)
    own = (1000 + turn_of, 0, min(400, asked.input_tokens))
    num_tokens = before.input_tokens + own[2]
    return replace(asked, spans=(*told, own), input_tokens=num_tokens, follows=turn_of, pause_s=0.5)


if __name__ == "__main__":
    main()
