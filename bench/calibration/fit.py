"""sage-sched bench fit: measure a server's step times, for the measured cost and the simulator."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

from bench.calibration.step_fit import StepFit, fit
from bench.servers.client import drive
from bench.servers.options import configure_servers, servers_of
from bench.servers.policy_server import PolicyServers, load_tokenizer, scheduler_state
from bench.servers.server import ServerError
from bench.workload.prompts import Workload, WorkloadError, WorkloadRequest, sample
from bench.workload.source import load_workload
from sage_sched.fields import ConfigError

# Requests in flight together, and tokens of their answers: from one alone to full slots or a full
# pool. Prompts of all lengths make the prefills.
PHASES = ((1, 48), (4, 96), (16, 64), (32, 192), (64, 32), (96, 256))


def configure(parser: argparse.ArgumentParser) -> None:
    configure_servers(parser, Path("results/fit"))


def run(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, where nothing could be fitted."""
    try:
        windows = measure(servers_of(args, {}), load_workload(args.data, args.heavy_tailed))
        found = fit(windows)
    except (ConfigError, ServerError, WorkloadError, ValueError) as error:
        print(f"sage-sched bench fit: {error}", file=sys.stderr)
        return 2
    file = args.output / "step_time.yaml"
    file.write_text(as_yaml(found), encoding="utf-8")
    print(f"{file.read_text(encoding='utf-8')}\nfor --sage-config: {file}")
    return 0


def as_yaml(found: StepFit) -> str:
    """The section of a --sage-config file."""
    head = (
        f"# fitted to {found.num_windows} windows of steps; mean absolute error on windows held "
        f"out: {found.mape:.1%}\n"
    )
    return head + yaml.safe_dump({"step_time": asdict(found.step_time)}, sort_keys=False)


def measure(servers: PolicyServers, workload: Workload) -> list[list[float]]:
    """Windows of steps (patches.step_meter.COLUMNS) at every load of PHASES, on one server.

    With requests of the history, as what is compared later must not have been seen before.
    """
    tokenizer = load_tokenizer(servers.model)
    windows: list[list[float]] = []
    with servers.server("sage", "fit") as server:
        for phase, (num_requests, output_tokens) in enumerate(tqdm(PHASES, desc="loads")):
            drawn = sample(workload.history, num_requests, seed=phase, at_most=True)
            lengths = np.random.default_rng(phase).integers(
                max(2, output_tokens // 2), output_tokens * 3 // 2, len(drawn)
            )
            chosen = [
                WorkloadRequest(r.prompt, int(n), r.class_name)
                for r, n in zip(drawn, lengths, strict=True)
            ]
            result = drive(
                server.url,
                chosen,
                [0.0] * len(chosen),
                tokenizer=tokenizer,
                max_new_tokens=2048,
                timeout_s=600.0,
                label=f"{num_requests} requests",
            )
            if problem := result.problem():
                raise ServerError(problem)
            windows = _joined(windows, scheduler_state(server)["steps"])
    return windows


def _joined(known: list[list[float]], latest: list[Any]) -> list[list[float]]:
    """All that was seen: the server keeps only the latest windows."""
    seen = {tuple(window) for window in known}
    return known + [window for window in latest if tuple(window) not in seen]
