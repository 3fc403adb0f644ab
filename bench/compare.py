"""Policies side by side: real servers, identical but for the policy, on the same arrivals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import requests
import yaml
from numpy.typing import NDArray
from tqdm import tqdm

from bench.arrivals import poisson_arrivals, trace_arrivals
from bench.baseline import UnloadedTime, saturated_rate
from bench.client import Answer, Result, drive
from bench.facts import host_facts
from bench.server import Server, ServerError
from bench.workload import Request, Workload, sample
from predictor_store.torchvision_schemas import define_missing
from predictor_store.warm import warm_store
from sage_sched.config import PredictorConfig, SageConfig
from sage_sched.policy import policy_names

# A host without an accelerator. Float16, SGLang's choice for a float32 model, is 3 times slower on
# a CPU. The pool holds about as much as its slots need, so that either may be what is full.
CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
    "--mem-fraction-static", "0.1", "--max-total-tokens", "16384", "--max-running-requests", "32",
)  # fmt: skip
# With more threads a small model's steps are mostly waiting at barriers, and one busy core beside
# the server makes it 10 times slower.
CPU_ENV = {"OMP_NUM_THREADS": "1"}
# Beside the server on two cores, embedding a prompt takes 50 to 200 ms.
CPU_SAGE = SageConfig(predictor=PredictorConfig(deadline_ms=1000.0))
# The cheapest model per token there, so that what takes time is what is scheduled.
CPU_MODEL: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1,
}  # fmt: skip
# The same for every server. Streaming every token takes more of a small host than decoding does;
# the first and the last token are sent at once whatever the interval.
_COMMON_FLAGS = (
    "--enable-custom-logit-processor", "--stream-interval", "16", "--log-level-http", "warning",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is compared.

    policies: names for --schedule-policy; ratios are to the first, which also sets the capacity.
    rates: each a number of requests/s, or "2x" for twice the capacity.
    num_seeds: each seed is another choice of requests and arrivals, the same for every policy.
    max_new_tokens: the cap that every request carries, well above most answers.
    trace: arrival times, see bench.arrivals; None for Poisson arrivals.
    sage: settings of our policies; the store's path is replaced by each run's own copy.
    run_timeout_s: answers that are not there so long after the last arrival make a run invalid.
    """

    workload: Workload
    model: Path
    output: Path
    policies: tuple[str, ...]
    rates: tuple[str, ...]
    num_seeds: int
    num_requests: int
    server_flags: tuple[str, ...]
    server_env: dict[str, str]
    max_new_tokens: int = 2048
    trace: Path | None = None
    sage: SageConfig
    run_timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """Measured on the first policy's server: requests/s when it always has a queue, and the time
    that a request takes alone."""

    capacity: float
    unloaded: UnloadedTime


def compare(settings: Settings) -> Iterator[dict[str, Any]]:
    """Runs everything, yielding each run's object once it is written to output/runs.jsonl.

    Raises ServerError where the first policy's server does not start; a later server that does
    not makes its run invalid.
    """
    runs_file = settings.output / "runs.jsonl"
    settings.output.mkdir(parents=True, exist_ok=True)
    if runs_file.exists():
        runs_file.replace(settings.output / "runs.previous.jsonl")
    tokenizer = _load_tokenizer(settings.model)
    store = settings.output / "store"
    if set(settings.policies) & set(policy_names()):
        shutil.rmtree(store, ignore_errors=True)
        warm_store(store, settings.workload.observations(), settings.sage.store)
    baseline = _measure_baseline(settings, tokenizer)
    facts = _facts(settings, baseline)
    tqdm.write(f"capacity: {facts['capacity']}\nunloaded TTLT: {facts['unloaded TTLT']}")
    plan = list(_plan(settings))
    with tqdm(total=len(plan), desc="runs", unit="run") as progress:
        for policy, rate, seed in plan:
            run = _run(settings, tokenizer, baseline, policy, rate, seed)
            run["settings"] = facts
            with runs_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            tqdm.write(_line(run))
            progress.update()
            yield run
    shutil.rmtree(settings.output / "run-store", ignore_errors=True)


def _plan(settings: Settings) -> Iterator[tuple[str, str, int]]:
    """Policy, rate, seed. The policies take turns, each seed beginning with another, so that a
    host that grows slower with time favours none of them."""
    policies = settings.policies
    for seed in range(settings.num_seeds):
        turn = seed % len(policies)
        for rate in settings.rates:
            for policy in (*policies[turn:], *policies[:turn]):
                yield policy, rate, seed


def _run(
    settings: Settings, tokenizer: Any, baseline: Baseline, policy: str, rate: str, seed: int
) -> dict[str, Any]:
    """One policy, rate and seed on a fresh server, as the object that is written."""
    chosen = sample(settings.workload.evaluation, settings.num_requests, seed)
    rate_per_s = requests_per_s(rate, baseline.capacity)
    arrivals_s = _arrivals(settings, seed) / rate_per_s
    about = {"policy": policy, "rate": rate, "seed": seed, "request_rate": rate_per_s}
    label = f"{policy} {rate} seed {seed}"
    try:
        with _server(settings, policy, label) as server:
            _warm_up(server, settings, tokenizer)
            result = _drive(server, settings, tokenizer, chosen, arrivals_s, label)
            counters = _counters(server)
    except ServerError as error:
        return {**about, "valid": False, "invalid_reason": str(error)}
    problem = result.problem()
    return {
        **about,
        "valid": not problem,
        "invalid_reason": problem or None,
        "duration": result.duration_s,
        **result.metrics,
        "largest_slowdown": max(baseline.unloaded.slowdown(a) for a in result.answers),
        "max_late_ms": max(answer.late_s for answer in result.answers) * 1e3,
        "counters": counters,
        "requests": _columns(result.answers, baseline.unloaded),
    }


def requests_per_s(rate: str, capacity: float) -> float:
    """What a rate of the command line means. Raises ValueError, which says what is allowed."""
    number = rate.removesuffix("x")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ValueError(f"rate is {rate!r}, allowed: requests/s above 0 (3.5) or a multiple (2x)")
    return value * capacity if rate.endswith("x") else value


def _arrivals(settings: Settings, seed: int) -> NDArray[np.float64]:
    if settings.trace is not None:
        return trace_arrivals(settings.trace, settings.num_requests, seed)
    return poisson_arrivals(settings.num_requests, seed)


def _server(settings: Settings, policy: str, name: str) -> Server:
    """A server for one run. What a run finishes goes into the store's history, and the same
    prompts come again with the next policy: so each has its own copy of the warmed store."""
    flags = [*settings.server_flags, *_COMMON_FLAGS, "--schedule-policy", policy]
    if policy in policy_names():
        store = settings.output / "run-store"
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(settings.output / "store", store)
        sections = asdict(settings.sage)
        sections["store"]["path"] = str(store.absolute())
        config = settings.output / "sage.yaml"
        config.write_text(yaml.safe_dump(sections), encoding="utf-8")
        flags += ["--sage-config", str(config)]
    log = settings.output / "logs" / f"{name.replace(' ', '-')}.log"
    return Server(settings.model, flags, log=log, env=settings.server_env)


def _drive(
    server: Server,
    settings: Settings,
    tokenizer: Any,
    chosen: Sequence[Request],
    arrivals_s: Sequence[float] | NDArray[np.float64],
    label: str,
) -> Result:
    return drive(
        server.url,
        chosen,
        [float(seconds) for seconds in arrivals_s],
        tokenizer=tokenizer,
        max_new_tokens=settings.max_new_tokens,
        timeout_s=settings.run_timeout_s,
        label=label,
    )


def _warm_up(server: Server, settings: Settings, tokenizer: Any) -> None:
    """A few short requests of the history, for what a server does only once."""
    drawn = sample(settings.workload.history, 24, seed=0, at_most=True)
    shortest = sorted(drawn, key=lambda request: request.output_tokens)[:8]
    _drive(server, settings, tokenizer, shortest, [0.0] * len(shortest), "warming up")


def _measure_baseline(settings: Settings, tokenizer: Any) -> Baseline:
    """With requests of the history, so that no evaluation prompt has been seen before."""
    history = settings.workload.history
    burst = sample(history, settings.num_requests, seed=1, at_most=True)
    # Alone: short and long inputs, answers of 16 to 256 tokens.
    ordered = sorted(burst, key=lambda request: len(request.prompt))
    probes = [
        Request(request.prompt, output_tokens, request.class_name)
        for output_tokens in (16, 64, 256)
        for request in (ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10])
    ]
    with _server(settings, settings.policies[0], "baseline") as server:
        _warm_up(server, settings, tokenizer)
        alone: list[Answer] = []
        for probe in tqdm(probes, desc="one at a time", unit="req", leave=False):
            result = _drive(server, settings, tokenizer, [probe], [0.0], "alone")
            _require_valid(result)
            alone += result.answers
        label = "burst, for the capacity"
        result = _drive(server, settings, tokenizer, burst, [0.0] * len(burst), label)
        _require_valid(result)
    return Baseline(saturated_rate(result.answers), UnloadedTime.fitted(alone))


def _require_valid(result: Result) -> None:
    if problem := result.problem():
        raise ServerError(f"the first policy's server failed: {problem}")


def _columns(answers: Sequence[Answer], unloaded: UnloadedTime) -> dict[str, list[Any]]:
    """What the report plots of each request, without its prompt."""
    return {
        "class": [answer.request.class_name for answer in answers],
        "input_tokens": [answer.input_tokens for answer in answers],
        "output_tokens": [answer.output_tokens for answer in answers],
        "sent_ms": [round(answer.sent_s * 1e3) for answer in answers],
        "ttft_ms": [round(answer.ttft_s * 1e3) for answer in answers],
        "e2e_latency_ms": [round(answer.ttlt_s * 1e3) for answer in answers],
        "slowdown": [round(unloaded.slowdown(answer), 3) for answer in answers],
        "error": [answer.error for answer in answers],
    }


def _counters(server: Server) -> dict[str, Any]:
    """What our policies count; empty under a stock policy."""
    try:
        info = requests.get(f"{server.url}/server_info", timeout=60).json()
    except requests.RequestException as error:
        raise ServerError(f"the server does not answer after the run: {error}") from error
    counters: dict[str, Any] = info["internal_states"][0].get("sage", {})
    return counters


def _facts(settings: Settings, baseline: Baseline) -> dict[str, Any]:
    unloaded = baseline.unloaded
    return {
        **host_facts(),
        "workload": settings.workload.description,
        "arrivals": f"trace {settings.trace.name}" if settings.trace else "Poisson",
        "requests a run": settings.num_requests,
        "max_new_tokens": settings.max_new_tokens,
        "model": _shape(settings.model),
        "server flags": " ".join((*settings.server_flags, *_COMMON_FLAGS)),
        "server environment": settings.server_env,
        "sage": asdict(settings.sage),
        "capacity": f"{baseline.capacity:.2f} requests/s ({settings.policies[0]}, with a queue)",
        "unloaded TTLT": f"{unloaded.base_s * 1e3:.0f} ms + {unloaded.per_input_token_s * 1e3:.3f} "
        f"ms per input token + {unloaded.per_output_token_s * 1e3:.3f} ms per output token",
    }


def _shape(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    numbers = ", ".join(f"{field} {config.get(field)}" for field in (*fields, "vocab_size"))
    return f"{config['architectures'][0]} ({numbers})"


def _load_tokenizer(model: Path) -> Any:
    define_missing()
    from sglang.benchmark.utils import get_tokenizer

    return get_tokenizer(str(model))


def _line(run: dict[str, Any]) -> str:
    label = f"{run['policy']:>24} {run['rate']:>6} seed {run['seed']}: "
    if not run["valid"]:
        return f"{label}INVALID: {run['invalid_reason']}"
    return label + (
        f"TTLT mean {run['mean_e2e_latency_ms'] / 1e3:.1f} s, "
        f"p99 {run['p99_e2e_latency_ms'] / 1e3:.1f} s; "
        f"TTFT mean {run['mean_ttft_ms'] / 1e3:.1f} s; {run['output_throughput']:.0f} tokens/s"
    )
