"""The engine and the policy that an operator runs, from a server or a preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.simulator.host import Host
from bench.simulator.presets import PRESETS, USUAL_HOST, Engine
from bench.simulator.stock import STOCK
from bench.workloads.prompts import WorkloadError
from predictor_store.ask_server import ask
from sage_sched.app.config import StepTimeConfig
from sage_sched.app.registry import policy_names
from sage_sched.fields import ConfigError, parse_section
from sage_sched.steps import StepTime

# Host memory to GPU: PCIe 4 x16, where kernels reach 25 of 32 GB/s.
_HOST_BANDWIDTH = 25e9
# Fewer plans or moves than this say nothing about their times.
_FEWEST = 100


@dataclass(frozen=True, slots=True)
class OwnServer:
    """The engine and policy of an operator.

    policy: as bench.policies.rival.Rival writes it; "" if unknown.
    description: for people.
    crps_gain: the recent quality of its predictions; None if unknown.
    """

    engine: Engine
    policy: str
    description: str
    crps_gain: float | None = None


def of_preset(name: str, step_time: StepTime | None = None) -> OwnServer:
    engine = PRESETS[name]
    return OwnServer(replace(engine, step_time=step_time or engine.step_time), "", f"preset {name}")


def of_running(url: str, step_time: StepTime | None, key: str = "") -> OwnServer:
    """Return the engine and policy of a running server, by its /server_info. Raises UserError.

    step_time: used instead of the server's own.
    key: its API key.
    """
    address = url.rstrip("/") + "/server_info"
    return of_info(ask(address, key), step_time, address)


def of_file(path: Path, step_time: StepTime | None) -> OwnServer:
    """Return a server's engine and policy, by a saved answer of /server_info. Raises
    WorkloadError."""
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WorkloadError(f"{path} holds no answer of /server_info: {error}") from error
    return of_info(info, step_time, str(path))


def of_info(info: Any, step_time: StepTime | None, source: str) -> OwnServer:
    """Read the answer of /server_info. Raises WorkloadError with the missing part."""
    try:
        state = info["internal_states"][0]
        num_replicas = int(info.get("dp_size") or 1)
        if num_replicas > 1:
            raise WorkloadError(
                f"{source}: dp_size is {num_replicas}, but only one engine can be simulated. Take "
                "the log of one replica, and --preset or a server of dp_size 1"
            )
        sage = state.get("sage") or {}
        learned, by = _step_time(sage, step_time, source)
        pool_tokens, page = int(info["max_total_num_tokens"]), int(info.get("page_size") or 1)
        swap_token_s = _swap_token_s(sage, state, pool_tokens)
        engine = Engine(
            step_time=learned,
            kv_pool_tokens=pool_tokens // page * page,
            max_running_requests=int(state["effective_max_running_requests_per_dp"]),
            page_size=page,
            chunked_prefill_size=_chunk_tokens(info, page),
            max_prefill_tokens=int(info["max_prefill_tokens"]),
            schedule_conservativeness=float(info.get("schedule_conservativeness", 1.0)),
            mixed_chunk=bool(info.get("enable_mixed_chunk")),
            swap_token_s=swap_token_s,
            host=_host(sage, swap_token_s),
            **_host_memory(sage),
        )
        policy = str(info["schedule_policy"])
        quality = sage.get("predictor", {}).get("quality", {})
        gain = quality.get("crps_gain") if quality.get("num_answers", 0) >= 100 else None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise WorkloadError(
            f"{source} is not the /server_info of a supported SGLang: {error!r}"
        ) from error
    known = policy in STOCK or policy in policy_names()
    said = f"{source}, step times {by}"
    if not known:
        said += f"; its policy, {policy}, cannot be simulated"
    return OwnServer(engine, policy if known else "", said, gain)


def _step_time(
    sage: Mapping[str, Any], given: StepTime | None, source: str
) -> tuple[StepTime, str]:
    if given is not None:
        return given, "as given"
    known = sage.get("step_time")
    if known is None:
        raise WorkloadError(
            f"{source} gives no step times, because its policy is not one of sage-sched. Give a "
            "file of `sage-sched bench fit` with --step-time, or take a --preset"
        )
    names = StepTimeConfig.__dataclass_fields__
    values = {name: known[name] for name in names}
    try:
        how = {"shipped": "shipped, as it has learned none yet"}.get(
            known["source"], known["source"]
        )
        return parse_section(StepTimeConfig, "step_time", values).step_time(), how
    except ConfigError as error:
        raise WorkloadError(f"{source}: {error}") from error


def _chunk_tokens(info: Mapping[str, Any], page: int) -> int:
    chunk = info.get("chunked_prefill_size")
    if chunk is None or int(chunk) <= 0:  # no chunks: a prompt is prefilled at once
        chunk = info["max_total_num_tokens"]
    return max(page, int(chunk) // page * page)


def _swap_token_s(sage: Mapping[str, Any], state: Mapping[str, Any], pool_tokens: int) -> float:
    """Return the seconds to move a token's KV: measured, or estimated from its size."""
    if measured_us := (sage.get("preemption") or {}).get("swap_token_us"):
        return float(measured_us) / 1e6
    kv_gb = float(state.get("memory_usage", {}).get("kvcache") or 0.0)
    return kv_gb * 1e9 / max(1, pool_tokens) / _HOST_BANDWIDTH


def _host(sage: Mapping[str, Any], swap_token_s: float) -> Host:
    """Return the host with the times of plans and moves that the server reports, and usual ones
    otherwise."""
    found, host = sage.get("preemption") or {}, USUAL_HOST
    if sage.get("num_passes", 0) >= _FEWEST:
        host = replace(host, plan_s=float(sage["mean_pass_ms"]) / 1e3)
    num_out = found.get("num_preemptions", 0) - found.get("num_left_in_tree", 0)
    num_moves = num_out + found.get("num_resumed", 0)
    if num_moves >= _FEWEST and found.get("host_pool_tokens"):
        token_bytes = found["host_pool_gib"] * 2**30 / found["host_pool_tokens"]
        of_bytes_s = found["swapped_bytes"] / token_bytes * swap_token_s
        host = replace(host, move_s=max(0.0, found["swapped_s"] - of_bytes_s) / num_moves)
    return host


def _host_memory(sage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field for the host memory's size. Without it, host memory has no limit: a server
    does not report it if its requests are never swapped out, or have not been yet."""
    found = (sage.get("preemption") or {}).get("host_pool_tokens")
    return {} if found is None else {"host_pool_tokens": int(found)}
