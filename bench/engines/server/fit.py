"""Implements `sage-sched bench fit`, which learns a server's step times for the simulator."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tqdm import tqdm

from bench.engines.server.client import body_of, drive, problem_of
from bench.engines.server.policy_server import (
    CPU_FLAGS,
    PolicyServers,
    scheduler_state,
    servers_in,
)
from bench.engines.server.server import ServerError
from bench.workloads.prompt_source import load_workload
from bench.workloads.prompts import Workload, sample
from predictor_store.config_file import read_config
from sage_sched.app.config import StepTimeConfig
from sage_sched.errors import UserError

# Phases of load: the number of requests in flight, and the tokens of each answer. They go from a
# single request to full slots or a full pool. Prompts of all lengths make the prefills.
PHASES = ((1, 48), (4, 96), (16, 64), (32, 192), (64, 32), (96, 256))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="the folder of datasets, for prompts of `mixed` (default: generated prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--model-path", type=Path, metavar="DIR", help="default: a small model, written to --output"
    )
    parser.add_argument(
        "--server-flags", type=shlex.split, metavar="FLAGS",
        help=f"SGLang's flags (default, for CPU hosts: {' '.join(CPU_FLAGS)})",
    )  # fmt: skip
    parser.add_argument("--sage-config", metavar="FILE", help="settings of our policies")
    parser.add_argument(
        "--output", type=Path, default=Path("results/fit"), metavar="DIR",
        help="the folder for all files (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Return 0. Raises UserError if nothing could be learned."""
    workload = load_workload(args.data, "generated" if args.data is None else "mixed")
    servers = servers_in(
        args.output, read_config(args.sage_config), None,
        model=args.model_path, flags=args.server_flags, env={},
    )  # fmt: skip
    learned = learn(servers, workload)["step_time"]
    file = args.output / "step_time.yaml"
    file.write_text(as_yaml(learned), encoding="utf-8")
    print(f"{file.read_text(encoding='utf-8')}\nfor --sage-config: {file}")
    return 0


def as_yaml(learned: dict[str, Any]) -> str:
    """Return the learned step times as a section of a --sage-config file.

    learned: the server's report (see patches.scheduler.calibration).
    """
    if learned["error"] is None:
        raise UserError(f"{learned['num_steps']} steps are too few to learn from")
    head = (
        f"# learned from {learned['num_steps']} steps; half of the steps took at most "
        f"{learned['error']:.1%} more or less than predicted\n"
    )
    section = {f.name: learned["latest"][f.name] for f in fields(StepTimeConfig)}
    return head + yaml.safe_dump({"step_time": section}, sort_keys=False)


def learn(servers: PolicyServers, workload: Workload) -> dict[str, Any]:
    """Return the report of one server's scheduler after every load of PHASES.

    The requests come from the history, because later comparisons need unseen prompts.
    """
    servers = replace(servers, sage=replace(servers.sage, step_time=None))
    with servers.server("sage", "fit") as server:
        for phase, (num_requests, output_tokens) in enumerate(tqdm(PHASES, desc="loads")):
            drawn = sample(workload.history, num_requests, seed=phase)
            lengths = np.random.default_rng(phase).integers(
                max(2, output_tokens // 2), output_tokens * 3 // 2, len(drawn)
            )
            bodies = [
                body_of(request.prompt, int(length), 2048)
                for request, length in zip(drawn, lengths, strict=True)
            ]
            label = f"{num_requests} requests"
            answers = drive(server.url, bodies, [0.0] * len(bodies), label=label)
            if problem := problem_of(answers):
                raise ServerError(problem)
        return scheduler_state(server)
