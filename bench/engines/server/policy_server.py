"""Starts servers that differ in their policy alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from bench.engines.clock.device import Device
from bench.engines.clock.device_clock import STATE
from bench.engines.clock.priority import go_first
from bench.engines.server.model import write_model
from bench.engines.server.server import Server, ServerError
from bench.policies.rival import Rival
from predictor_store.data.warm import Observation, warm_store
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names

# These flags are for a host without an accelerator. Float16, SGLang's choice for a float32 model,
# is 3 times slower on a CPU. Memory that other processes take while a server starts looks like its
# weights to SGLang. The fraction bounds that error.
CPU_ENGINE_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
    "--mem-fraction-static", "0.5",
)  # fmt: skip
# The pool holds about as much as its slots need, so either may be full.
CPU_FLAGS = (*CPU_ENGINE_FLAGS, "--max-total-tokens", "16384", "--max-running-requests", "32")
# With more threads a small model's steps mostly wait at barriers, and one busy core on the host
# makes it 10 times slower.
CPU_ENV = {"OMP_NUM_THREADS": "1"}
# Whole numbers in our reports that are no counters.
_GAUGES = ("num_records", "worker_alive")
# The cheapest model per token on such a host, so that scheduling matters.
CPU_MODEL: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1,
    "context_length": 32768,
}  # fmt: skip
# These flags are the same for every server. Streaming every token costs a small host more than
# decoding does. The first and the last token are sent at once at any interval.
COMMON_FLAGS = (
    "--enable-custom-logit-processor", "--stream-interval", "16", "--log-level-http", "warning",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyServers:
    """Starts servers of one model, with flags and environment the same for all.

    folder: for logs, settings and the store.
    sage: our policies' settings. Each server reads the warmed store, and learns in memory only.
    device: the device that their clock models, if any.
    """

    model: Path
    folder: Path
    flags: tuple[str, ...]
    env: Mapping[str, str]
    sage: SageConfig
    device: Device | None = None

    def warm(self, observations: Sequence[Observation]) -> None:
        """Make the store with which every server of our policies begins."""
        store = self.folder / "store"
        shutil.rmtree(store, ignore_errors=True)
        warm_store(store, observations, self.sage.store, self.sage.predictor.encoder)

    def server(self, policy: str, name: str) -> Server:
        """Return a server that is not started yet. Raises ValueError for an unknown policy.

        policy: see Rival.
        name: the name of its log file.
        """
        rival = Rival.parse(policy)
        flags = [*COMMON_FLAGS, *rival.flags]
        env = {**self.env, **rival.env}
        if self.device is not None:
            flags += self.device.flags()
            env |= self.device.environment(self.folder / "device_clock")
        else:
            # A server imports bench/workloads/forced_length.py by its name.
            env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")} | env
            path = (env["PYTHONPATH"], str(Path(__file__).parents[3]))
            env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        if policy in policy_names():
            sage = self.sage if self.device is None else self.device.sped_up(self.sage)
            sections = sage.sections()
            # The same prompts may come again: the next server must not know their answers.
            sections["store"] |= {"path": str((self.folder / "store").absolute()), "on_disk": False}
            config = self.folder / f"{policy}.yaml"
            self.folder.mkdir(parents=True, exist_ok=True)
            config.write_text(yaml.safe_dump(sections), encoding="utf-8")
            flags += ["--sage-config", str(config)]
        flags += self.flags  # the last one counts
        log = self.folder / "logs" / f"{name.replace(' ', '-')}.log"
        return Server(self.model, flags, log=log, env=env)


def servers_in(
    folder: Path,
    sage: SageConfig,
    device: Device | None,
    *,
    model: Path | None,
    flags: Sequence[str] | None,
    env: Mapping[str, str],
) -> PolicyServers:
    """Return the servers of these options.

    folder: for all files that are written.
    model: None for a small one.
    flags: SGLang's; None for CPU_FLAGS.
    env: the servers' environment, if flags are given.
    """
    if device is not None:
        go_first()
        flags = (*CPU_ENGINE_FLAGS, *(flags or ()))
    return PolicyServers(
        model=model or write_model(folder / "model", **CPU_MODEL),
        folder=folder,
        flags=CPU_FLAGS if flags is None else tuple(flags),
        env=CPU_ENV if flags is None or device is not None else env,
        sage=sage,
        device=device,
    )


def internal_state(server: Server) -> dict[str, Any]:
    """Return the state of the first scheduler, with the sum of the device clocks of all
    replicas."""
    try:
        info = requests.get(f"{server.url}/server_info", timeout=60).json()
    except requests.RequestException as error:
        raise ServerError(f"the server does not answer: {error}") from error
    states: list[dict[str, Any]] = info["internal_states"]
    if STATE in states[0]:
        did = [state[STATE] for state in states]
        states[0][STATE] = {name: sum(each[name] for each in did) for name in did[0]}
    return states[0]


def scheduler_state(server: Server) -> dict[str, Any]:
    """Return our policies' report of the first scheduler; empty under a stock policy."""
    state: dict[str, Any] = internal_state(server).get("sage", {})
    return state


def counters_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of our policies between two internal states, with other fields as in the
    second; empty under a stock policy."""

    def spent(name: str, first: Any, last: Any) -> Any:
        if isinstance(last, dict):
            first = first if isinstance(first, dict) else {}
            return {key: spent(key, first.get(key, 0), value) for key, value in last.items()}
        is_counter = isinstance(last, int) and name not in _GAUGES
        return last - (first or 0) if is_counter else last

    counted: dict[str, Any] = spent("", before.get("sage", {}), after.get("sage", {}))
    return counted
