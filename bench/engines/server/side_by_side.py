"""Policies side by side: real servers, identical but for the policy, on the same arrivals."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.engines.baseline import ModelledTime, Unloaded, UnloadedTime
from bench.engines.clock.device import MAX_LATE_SHARE, DeviceUse
from bench.engines.run_metrics import run_metrics
from bench.engines.saturation import Saturation
from bench.engines.server.client import Answer, ServedRun, drive
from bench.engines.server.facts import host_facts
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.policy_server import (
    COMMON_FLAGS,
    PolicyServers,
    counters_between,
    internal_state,
    load_tokenizer,
)
from bench.engines.server.server import Server, ServerError
from bench.experiment.spec import requests_per_s
from bench.workloads.arrivals import PULSE_REQUESTS, arrivals_of, num_requests_of, trace_arrivals
from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, sample
from sage_sched.registry import policy_names

# How often a run is made, at most, that a device clock's host holds up.
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is compared.

    policies: see bench.engines.rival.Rival; ratios are to the first, which also sets the capacity.
    rates: each a number of requests/s, or "2x" for twice the capacity.
    num_seeds: each seed, from first_seed on, is another choice of requests and arrivals, the same
        for every policy.
    num_requests: a run; None for what the load has (bench.workloads.arrivals.num_requests_of), of
        sustained load at most as many as the workload has prompts.
    load: one of bench.workloads.arrivals.LOADS.
    max_new_tokens: the cap that every request carries, well above most answers.
    trace: arrival times in the load's place, see bench.workloads.arrivals.
    cold: whether predictors begin each run with an empty history, and not with the workload's.
    run_timeout_s: answers that are not there so long after the last arrival make a run invalid.
    """

    workload: Workload
    servers: PolicyServers
    policies: tuple[str, ...]
    rates: tuple[str, ...]
    num_seeds: int
    first_seed: int = 0
    num_requests: int | None = None
    load: str = "pulse"
    max_new_tokens: int = 2048
    trace: Path | None = None
    run_timeout_s: float = 1800.0
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Baseline:
    """Measured on the first policy's server: what it does when it always has a queue, and the time
    that a request takes alone."""

    saturated: Saturation
    unloaded: Unloaded

    @property
    def capacity(self) -> float:
        """Requests/s."""
        return self.saturated.capacity


def compare_policies(settings: Settings) -> Iterator[dict[str, Any]]:
    """Runs everything, yielding each run's object once it is written to output/runs.jsonl.

    Raises ServerError where the first policy's server does not start; a later server that does
    not makes its run invalid.
    """
    # Ended from outside (`timeout`, CI), the servers end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs_file = settings.servers.folder / "runs.jsonl"
    settings.servers.folder.mkdir(parents=True, exist_ok=True)
    if runs_file.exists():
        runs_file.replace(settings.servers.folder / "runs.previous.jsonl")
    tokenizer = load_tokenizer(settings.servers.model)
    if any(map(_predicts, settings.policies)):
        tqdm.write("filling the predictor's history")
        settings.servers.warm([] if settings.cold else settings.workload.observations())
        settings.servers.foresee(_warming(settings))
    with KeptServer(settings.servers) as kept:
        tqdm.write(f"measuring what {settings.policies[0]} takes and sustains")
        baseline = _measure_baseline(settings, tokenizer, kept)
        facts = _facts(settings, baseline)
        tqdm.write(f"capacity: {facts['capacity']}\nunloaded TTLT: {facts['unloaded TTLT']}")
        plan = list(_plan(settings))
        settings.servers.foresee(
            request
            for policy, rate, seed in plan
            if _predicts(policy)
            for request in _chosen(settings, baseline, rate, seed)
        )
        with tqdm(total=len(plan), desc="runs", unit="run") as progress:
            for policy, rate, seed in plan:
                tqdm.write(f"{policy}, rate {rate}, seed {seed}")
                run = _run_in_time(settings, tokenizer, kept, baseline, policy, rate, seed)
                run["settings"] = facts
                with runs_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
                tqdm.write(_line(run))
                progress.update()
                yield run


def _predicts(policy: str) -> bool:
    return policy in policy_names()


def _plan(settings: Settings) -> Iterator[tuple[str, str, int]]:
    """Policy, rate, seed. The policies take turns, each seed beginning with another, so that a
    host that grows slower with time favours none of them. On a device clock it does not matter,
    and a policy's server serves all its runs."""
    policies = settings.policies
    seeds = range(settings.first_seed, settings.first_seed + settings.num_seeds)
    if settings.servers.device is not None:
        yield from product(policies, settings.rates, seeds)
        return
    for seed in seeds:
        turn = seed % len(policies)
        for rate in settings.rates:
            for policy in (*policies[turn:], *policies[:turn]):
                yield policy, rate, seed


def _run_in_time(settings: Settings, *of_run: Any) -> dict[str, Any]:
    """_run, once more where a device clock's host held it up: it may have been busy for a while."""
    for _ in range(_TRIES - 1):
        run = _run(settings, *of_run)
        if not run["late"]:
            return run
        tqdm.write(f"{_line(run)}; once more")
    return _run(settings, *of_run)


def _run(
    settings: Settings,
    tokenizer: Any,
    kept: KeptServer,
    baseline: Baseline,
    policy: str,
    rate: str,
    seed: int,
) -> dict[str, Any]:
    """One policy, rate and seed, as the object that is written."""
    chosen = _chosen(settings, baseline, rate, seed)
    rate_per_s = requests_per_s(rate, baseline.capacity)
    arrivals_s = _arrivals(settings, len(chosen), seed) / rate_per_s
    about = {"policy": policy, "rate": rate, "seed": seed, "request_rate": rate_per_s}
    label = f"{policy} {rate} seed {seed}"
    try:
        server = kept.get(policy, label)
        _warm_up(server, settings, tokenizer)
        before = internal_state(server)
        result = _drive(server, settings, tokenizer, chosen, arrivals_s, label)
        after = internal_state(server)
    except ServerError as error:
        kept.drop()
        return {**about, "valid": False, "invalid_reason": str(error), "late": False}
    use = _device_use(settings, before, after)
    counters = counters_between(before, after)
    problem, late = result.problem(), ""
    if use is not None:
        late = use.problem() or _late_predictions(counters, len(chosen))
    return {
        **about,
        "valid": not (problem or late),
        "invalid_reason": problem or late or None,
        "late": bool(late),
        "duration": result.duration_s,
        **result.metrics,
        **_waiting(result.answers, baseline.unloaded),
        "max_late_ms": max(answer.late_s for answer in result.answers) * 1e3,
        "counters": counters,
        "device": None if use is None else asdict(use),
        "requests": _columns(result.answers, baseline.unloaded),
    }


def _chosen(settings: Settings, baseline: Baseline, rate: str, seed: int) -> list[WorkloadRequest]:
    """The requests of a run."""
    wanted = settings.num_requests
    if wanted is None:
        rate_per_s = requests_per_s(rate, baseline.capacity)
        wanted = num_requests_of(settings.load, rate_per_s, baseline.saturated.service_s)
    # A server would know the answer to a prompt that comes again.
    chosen = settings.workload.drawn(wanted, seed, again=False)
    if len(chosen) < wanted and (settings.num_requests or settings.load != "sustained"):
        raise WorkloadError(f"a run needs {wanted} prompts, the workload has {len(chosen)}")
    return chosen


def _arrivals(settings: Settings, num_requests: int, seed: int) -> NDArray[np.float64]:
    if settings.trace is not None:
        return trace_arrivals(settings.trace, num_requests, seed)
    return arrivals_of(settings.load, num_requests, seed)


def _drive(
    server: Server,
    settings: Settings,
    tokenizer: Any,
    chosen: Sequence[WorkloadRequest],
    arrivals_s: Sequence[float] | NDArray[np.float64],
    label: str,
) -> ServedRun:
    return drive(
        server.url,
        chosen,
        [float(seconds) for seconds in arrivals_s],
        tokenizer=tokenizer,
        max_new_tokens=settings.max_new_tokens,
        timeout_s=settings.run_timeout_s,
        label=label,
        speed=settings.servers.speed,
    )


def _late_predictions(counters: dict[str, Any], num_requests: int) -> str:
    """Why a run on a device clock must not be counted, or ""."""
    num_late = counters.get("predictor", {}).get("num_deadline_misses", 0)
    if num_late <= MAX_LATE_SHARE * num_requests:
        return ""
    return (
        f"{num_late} of {num_requests} requests went on without a prediction, which the host had "
        "not ready: it is overloaded, or --speed too high for it"
    )


def _device_use(
    settings: Settings, before: dict[str, Any], after: dict[str, Any]
) -> DeviceUse | None:
    """Between two internal states; None without a device clock."""
    device = settings.servers.device
    return None if device is None else DeviceUse.between(before, after, device.speed)


def _warm_up(server: Server, settings: Settings, tokenizer: Any) -> None:
    """For what a server does only once."""
    shortest = _warming(settings)
    _drive(server, settings, tokenizer, shortest, [0.0] * len(shortest), "warming up")


def _warming(settings: Settings) -> list[WorkloadRequest]:
    """A few short requests of the history."""
    drawn = sample(settings.workload.history, 24, seed=0, at_most=True)
    return sorted(drawn, key=lambda request: request.output_tokens)[:8]


def _measure_baseline(settings: Settings, tokenizer: Any, kept: KeptServer) -> Baseline:
    """With requests of the history, so that no evaluation prompt has been seen before."""
    history = settings.workload.history
    burst = sample(history, settings.num_requests or PULSE_REQUESTS, seed=1, at_most=True)
    if _predicts(settings.policies[0]):
        settings.servers.foresee(burst)
    server = kept.get(settings.policies[0], "baseline")
    _warm_up(server, settings, tokenizer)
    unloaded = _unloaded(server, settings, tokenizer, burst)
    for _ in range(_TRIES):
        before = internal_state(server)
        label = "burst, for the capacity"
        result = _drive(server, settings, tokenizer, burst, [0.0] * len(burst), label)
        _require_valid(result)
        use = _device_use(settings, before, internal_state(server))
        late = "" if use is None else use.problem()
        if not late:
            break
        server = kept.get(settings.policies[0], "baseline")
    else:
        raise ServerError(f"the capacity could not be measured: {late}")
    first_s = np.array([answer.first_token_s for answer in result.answers])
    last_s = np.array([answer.last_token_s for answer in result.answers])
    return Baseline(Saturation.measured(first_s, last_s), unloaded)


def _unloaded(
    server: Server, settings: Settings, tokenizer: Any, requests: Sequence[WorkloadRequest]
) -> Unloaded:
    """Known of a device clock; else measured: short and long inputs, answers of 16 to 256 tokens,
    one at a time."""
    if settings.servers.device is not None:
        return ModelledTime(settings.servers.device)
    ordered = sorted(requests, key=lambda request: len(request.prompt))
    probes = [
        WorkloadRequest(request.prompt, output_tokens, request.class_name)
        for output_tokens in (16, 64, 256)
        for request in (ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10])
    ]
    alone: list[Answer] = []
    for probe in tqdm(probes, desc="one at a time", unit="req", leave=False):
        result = _drive(server, settings, tokenizer, [probe], [0.0], "alone")
        _require_valid(result)
        alone += result.answers
    return UnloadedTime.fitted(alone)


def _require_valid(result: ServedRun) -> None:
    if problem := result.problem():
        raise ServerError(f"the first policy's server failed: {problem}")


def _unloaded_s(answers: Sequence[Answer], unloaded: Unloaded) -> NDArray[np.float64]:
    return np.array([unloaded.seconds(a.input_tokens, a.output_tokens) for a in answers])


def _waiting(answers: Sequence[Answer], unloaded: Unloaded) -> dict[str, float]:
    """What SGLang's metrics do not say."""
    unloaded_s = _unloaded_s(answers, unloaded)
    sent_s, first_s, last_s = np.array(
        [(a.sent_s, a.first_token_s, a.last_token_s) for a in answers]
    ).T
    return {
        "largest_slowdown": float(((last_s - sent_s) / unloaded_s).max()),
        **run_metrics(
            sent_s, first_s, last_s, np.array([a.output_tokens for a in answers]), unloaded_s
        ),
    }


def _columns(answers: Sequence[Answer], unloaded: Unloaded) -> dict[str, list[Any]]:
    """What the report plots of each request, without its prompt."""
    return {
        "class": [answer.request.class_name for answer in answers],
        "input_tokens": [answer.input_tokens for answer in answers],
        "output_tokens": [answer.output_tokens for answer in answers],
        "sent_ms": [round(answer.sent_s * 1e3) for answer in answers],
        "ttft_ms": [round(answer.ttft_s * 1e3) for answer in answers],
        "e2e_latency_ms": [round(answer.ttlt_s * 1e3) for answer in answers],
        "slowdown": [
            round(answer.ttlt_s / alone_s, 3)
            for answer, alone_s in zip(answers, _unloaded_s(answers, unloaded), strict=True)
        ],
        "error": [answer.error for answer in answers],
    }


def _facts(settings: Settings, baseline: Baseline) -> dict[str, Any]:
    device = settings.servers.device
    return {
        **({} if device is None else {"device clock": device.preset, "speed": device.speed}),
        **host_facts(),
        "workload": settings.workload.description,
        "arrivals": f"trace {settings.trace.name}" if settings.trace else settings.load,
        "requests a run": settings.num_requests or "by the load",
        "max_new_tokens": settings.max_new_tokens,
        "history at first": "empty" if settings.cold else "the workload's",
        "model": _shape(settings.servers.model),
        "server flags": " ".join((*settings.servers.flags, *COMMON_FLAGS)),
        "server environment": dict(settings.servers.env),
        "sage": settings.servers.sage.sections(),
        "capacity": f"{baseline.capacity:.2f} requests/s ({settings.policies[0]}, with a queue)",
        "in service": f"{baseline.saturated.service_s:.2f} s on average, from a request's first "
        "token to its last, then",
        "unloaded TTLT": baseline.unloaded.description,
    }


def _shape(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    numbers = ", ".join(f"{field} {config.get(field)}" for field in (*fields, "vocab_size"))
    return f"{config['architectures'][0]} ({numbers})"


def _line(run: dict[str, Any]) -> str:
    label = f"{run['policy']:>24} {run['rate']:>6} seed {run['seed']}: "
    if not run["valid"]:
        return f"{label}INVALID: {run['invalid_reason']}"
    return label + (
        f"TTLT mean {run['mean_e2e_latency_ms'] / 1e3:.1f} s, "
        f"p99 {run['p99_e2e_latency_ms'] / 1e3:.1f} s; "
        f"waited {run['mean_waited_s']:.1f} s; TTFT mean {run['mean_ttft_ms'] / 1e3:.1f} s; "
        f"{run['output_throughput']:.0f} tokens/s; drain {run['drain_s']:.0f} s"
    )
