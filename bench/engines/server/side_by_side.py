"""Policies side by side: real servers, identical but for the policy, on the same arrivals."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.engines.baseline import PILOT_REQUESTS, Saturation, UnloadedTime, sustained
from bench.engines.server.client import Answer, as_seen, body_of, drive, problem_of
from bench.engines.server.facts import host_facts
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.policy_server import COMMON_FLAGS, PolicyServers
from bench.engines.server.server import ServerError
from bench.simulator.request import SimRequest
from bench.simulator.result import Served, alone_s
from bench.workloads.arrivals import arrivals_of, num_requests_of, requests_per_s, trace_arrivals
from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, sample
from sage_sched.registry import policy_names

# How long requests arrive in a run that measures the capacity, and the least and most of them.
_CAPACITY_S = 1200.0
_CAPACITY_REQUESTS = (PILOT_REQUESTS, 1500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is compared.

    policies: see bench.policies.rival.Rival; ratios are to the first, which also sets the capacity.
    rates: each a number of requests/s, or "2x" for twice the capacity.
    num_seeds: each seed, from first_seed on, is another choice of requests and arrivals, the same
        for every policy.
    num_requests: a run; None for what the load has (bench.workloads.arrivals.num_requests_of), of
        sustained load at most as many as the workload has prompts.
    load: one of bench.workloads.arrivals.LOADS.
    max_new_tokens: the cap that every request carries, well above most answers.
    trace: arrival times in the load's place, see bench.workloads.arrivals.
    ttft_slo_s, tpot_slo_s: what a good request keeps.
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
    ttft_slo_s: float = 2.0
    tpot_slo_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Baseline:
    """Measured on the first policy's server. saturated: if it always has a queue; NaN if nobody
    asks. alone_s: what a request of so many tokens in and out takes alone; description: where that
    is known from."""

    saturated: Saturation
    alone_s: Callable[[int, int], float]
    description: str


def compare_policies(settings: Settings) -> Iterator[dict[str, Any]]:
    """Runs everything, yielding each run's object once it is written to output/runs.jsonl.

    Raises ServerError where the first policy's server does not start; a later server that does
    not makes its run invalid.
    """
    # Ended from outside (`timeout`, CI), the servers end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    servers = settings.servers
    runs_file = servers.folder / "runs.jsonl"
    servers.folder.mkdir(parents=True, exist_ok=True)
    if runs_file.exists():
        runs_file.replace(servers.folder / "runs.previous.jsonl")
    if not {*settings.policies}.isdisjoint(policy_names()):
        tqdm.write("filling the predictor's history")
        servers.warm(settings.workload.observations())
    with closing(KeptServer(servers)) as kept:
        baseline = _measure_baseline(settings, kept)
        facts = _facts(settings, baseline)
        if "capacity" in facts:
            tqdm.write(f"capacity: {facts['capacity']}\nunloaded TTLT: {facts['unloaded TTLT']}")
        plan = list(_plan(settings))
        with tqdm(total=len(plan), desc="runs", unit="run") as progress:
            for policy, rate, seed in plan:
                tqdm.write(f"{policy}, rate {rate}, seed {seed}")
                run = _run(settings, kept, baseline, policy, rate, seed)
                run["settings"] = facts
                with runs_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
                tqdm.write(_line(run))
                progress.update()
                yield run


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


def _run(
    settings: Settings, kept: KeptServer, baseline: Baseline, policy: str, rate: str, seed: int
) -> dict[str, Any]:
    """One policy, rate and seed, as the object that is written."""
    chosen = _chosen(settings, baseline, rate, seed)
    rate_per_s = requests_per_s(rate, baseline.saturated.capacity)
    if settings.trace is None:
        arrivals_s = arrivals_of(settings.load, len(chosen), seed) / rate_per_s
    else:
        arrivals_s = trace_arrivals(settings.trace, len(chosen), seed) / rate_per_s
    label = f"{policy} {rate} seed {seed}"
    about = {"policy": policy, "rate": rate, "seed": seed, "request_rate": rate_per_s}
    try:
        run = kept.run(
            policy,
            label,
            lambda url: _drive(url, settings, chosen, arrivals_s, label),
            prepare=lambda url: _warm_up(url, settings),
        )
    except ServerError as error:
        kept.close()
        return {**about, "valid": False, "invalid_reason": str(error)}
    failed = problem_of(run.answers)
    problem = failed or run.late
    about |= {
        "valid": not problem,
        "invalid_reason": problem or None,
        "counters": run.counters,
        "device": None if run.use is None else asdict(run.use),
    }
    if failed:
        return about
    served = as_seen(baseline.alone_s, _requests(settings, chosen, run.answers), run.answers)
    return {
        **about,
        "completed": len(run.answers),
        **served.metrics(),
        "good_share": served.good_share(settings.ttft_slo_s, settings.tpot_slo_s),
        "max_late_ms": max(answer.late_s for answer in run.answers) * 1e3,
        "requests": _columns(served),
    }


def _chosen(settings: Settings, baseline: Baseline, rate: str, seed: int) -> list[WorkloadRequest]:
    """The requests of a run."""
    wanted = settings.num_requests
    if wanted is None:
        rate_per_s = requests_per_s(rate, baseline.saturated.capacity)
        wanted = num_requests_of(settings.load, rate_per_s, baseline.saturated.service_s)
    # A server would know the answer to a prompt that comes again.
    chosen = settings.workload.drawn(wanted, seed, again=False)
    if len(chosen) < wanted and (settings.num_requests or settings.load != "sustained"):
        raise WorkloadError(f"a run needs {wanted} prompts, the workload has {len(chosen)}")
    return chosen


def _drive(
    url: str,
    settings: Settings,
    chosen: Sequence[WorkloadRequest],
    arrivals_s: Sequence[float] | NDArray[np.float64],
    label: str,
) -> list[Answer]:
    cap = settings.max_new_tokens
    return drive(
        url,
        [body_of(request.prompt, request.output_tokens, cap) for request in chosen],
        [float(seconds) for seconds in arrivals_s],
        label=label,
        speed=settings.servers.speed,
    )


def _requests(
    settings: Settings, chosen: Sequence[WorkloadRequest], answers: Sequence[Answer]
) -> list[SimRequest]:
    """What was asked, as the server has counted it."""
    return [
        SimRequest(
            arrival_s=answer.sent_s,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            max_new_tokens=settings.max_new_tokens,
            distribution=None,
            class_name=request.class_name,
        )
        for request, answer in zip(chosen, answers, strict=True)
    ]


def _warm_up(url: str, settings: Settings) -> None:
    """For what a server does only once: a few short requests of the history."""
    drawn = sample(settings.workload.history, 24, seed=0)
    shortest = sorted(drawn, key=lambda request: request.output_tokens)[:8]
    _drive(url, settings, shortest, [0.0] * len(shortest), "warming up")


def _measure_baseline(settings: Settings, kept: KeptServer) -> Baseline:
    """With requests of the history, so that no evaluation prompt has been seen before. What one
    takes alone is known of a device clock."""
    device, first = settings.servers.device, settings.policies[0]
    told = "" if device is None else f"by the step times of {device.preset}"
    are_numbers = settings.num_requests and not any(rate.endswith("x") for rate in settings.rates)
    if device is not None and are_numbers:
        return Baseline(Saturation(nan, nan), partial(alone_s, device.engine), told)
    alone: list[Answer] = []

    def prepare(url: str) -> None:
        _warm_up(url, settings)
        if device is None and not alone:
            alone[:] = _one_at_a_time(url, settings, sample(history, PILOT_REQUESTS, seed=1))

    def serve(arrivals_s: NDArray[np.float64]) -> Served:
        """Prompts come again if the history has too few: their prefill is then cheaper."""
        asked = settings.workload.drawn(len(arrivals_s), seed=1, from_history=True)
        tqdm.write(
            f"measuring what {first} sustains: {len(asked)} requests, "
            f"{arrivals_s[-1] / settings.servers.speed:.0f} s and what is then left"
        )

        def send(url: str) -> list[Answer]:
            return _drive(url, settings, asked, arrivals_s, "capacity")

        run = kept.run(first, "baseline", send, prepare=prepare)
        if problem := problem_of([*run.answers, *alone]):
            raise ServerError(f"the first policy's server failed: {problem}")
        if run.late:
            raise ServerError(f"the capacity could not be measured: {run.late}")
        return as_seen(lambda *_: nan, _requests(settings, asked, run.answers), run.answers)

    history = settings.workload.history
    saturated = sustained(serve, lambda rate: int(np.clip(rate * _CAPACITY_S, *_CAPACITY_REQUESTS)))
    if device is not None:
        return Baseline(saturated, partial(alone_s, device.engine), told)
    fitted = UnloadedTime.fitted(alone)
    return Baseline(saturated, fitted.seconds, fitted.description)


def _one_at_a_time(
    url: str, settings: Settings, requests: Sequence[WorkloadRequest]
) -> list[Answer]:
    """Short and long inputs, answers of 16 to 256 tokens."""
    ordered = sorted(requests, key=lambda request: len(request.prompt))
    probes = [
        replace(request, output_tokens=output_tokens)
        for output_tokens in (16, 64, 256)
        for request in (ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10])
    ]
    return [
        answer
        for probe in tqdm(probes, desc="one at a time", unit="req", leave=False)
        for answer in _drive(url, settings, [probe], [0.0], "alone")
    ]


def _columns(served: Served) -> dict[str, list[Any]]:
    """What the report plots of each request, without its prompt."""
    return {
        "class": served.class_names.tolist(),
        "input_tokens": served.input_tokens.tolist(),
        "output_tokens": served.answer_tokens.tolist(),
        "sent_ms": np.rint(served.arrival_s * 1e3).astype(int).tolist(),
        "ttft_ms": np.rint(served.ttft_s * 1e3).astype(int).tolist(),
        "e2e_latency_ms": np.rint(served.ttlt_s * 1e3).astype(int).tolist(),
        "slowdown": np.round(served.ttlt_s / served.alone_s, 3).tolist(),
    }


def _facts(settings: Settings, baseline: Baseline) -> dict[str, Any]:
    device, (capacity, service_s) = settings.servers.device, baseline.saturated
    measured = {
        "capacity": f"{capacity:.2f} requests/s ({settings.policies[0]}, with a queue)",
        "in service": f"{service_s:.2f} s on average, from a request's first token to its last, "
        "then",
    }
    return {
        **({} if isnan(capacity) else measured),
        **({} if device is None else {"device clock": device.preset, "speed": device.speed}),
        **host_facts(),
        "workload": settings.workload.description,
        "arrivals": f"trace {settings.trace.name}" if settings.trace else settings.load,
        "requests a run": settings.num_requests or "by the load",
        "max_new_tokens": settings.max_new_tokens,
        "model": _shape(settings.servers.model),
        "server flags": " ".join((*settings.servers.flags, *COMMON_FLAGS)),
        "server environment": dict(settings.servers.env),
        "sage": settings.servers.sage.sections(),
        "unloaded TTLT": baseline.description,
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
