"""sage-sched bench urgency: how long urgent requests wait, and what the others pay for it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.comparison.session_bodies import as_seen, served, session_servers
from bench.comparison.stats import with_interval
from bench.engines.baseline import Saturation
from bench.engines.clock.device import Device
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.server import ServerError
from bench.engines.simulator.presets import PRESETS, Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Served
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from bench.triage.requests import LOADS, Triage, arrivals_s, read_triage, said_by
from bench.workloads.prompts import WorkloadError
from predictor_store.data.files import DatasetError
from predictor_store.terminal import add_json, at_least_one, print_json, speaker
from sage_sched.config import SageConfig
from sage_sched.job import DEFAULT_URGENCY
from sage_sched.slo import SloConfig

# By a policy.
_Serve = Callable[[str, Sequence[SimRequest]], Served]

# Seeds below are for tuning.
_FIRST_SEED = 1000
_BURST_SEED = 1_000_003
# Policies, and who says how urgent a request is.
_ARMS = (
    ("fcfs", "nobody"),
    ("shortest-prefill-first", "nobody"),
    ("sage", "nobody"),
    ("urgency", "expert"),
    ("urgency", "nurse"),
    ("urgency", "model"),
    ("urgency", "chance"),
    ("urgency-order", "expert"),
    ("urgency-arrival", "expert"),
)
ARMS = {policy if who == "nobody" else f"{policy}:{who}": (policy, who) for policy, who in _ARMS}
# Of the policies to whose numbers those of all others are shown as a ratio.
_REFERENCES = ("fcfs", "sage")
_COLUMNS = (
    "level 1", "levels 1, 2", "their p99", "levels 3 to 5", "all", "TTFT level 1, s", "TTLT, s",
    "p99, s", "tokens/s",
)  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--preset", choices=PRESETS, default="h800-qwen3-32b")
    parser.add_argument(
        "--rate", type=float, default=1.8, help="times what fcfs sustains (default: %(default)s)"
    )
    parser.add_argument("--num-requests", type=at_least_one, default=600, help="a run")
    parser.add_argument("--seeds", type=at_least_one, default=5, help="default: %(default)s")
    parser.add_argument(
        "--loads", nargs="+", choices=LOADS, default=LOADS, help="default: %(default)s"
    )
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, metavar="POLICY[:WHO]",
        help=f"policies, and who says how urgent a request is: {', '.join(ARMS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--tuning", action="store_true", help="the seeds settings were chosen by")
    parser.add_argument(
        "--on-servers", action="store_true",
        help="real servers on the preset's device clock, in the place of the simulator",
    )  # fmt: skip
    parser.add_argument("--speed", type=float, default=4.0, help="of the clock")
    parser.add_argument("--output", type=Path, default=Path("results/urgency"), metavar="DIR")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, where nothing can be simulated."""
    try:
        rows = _compare(args, read_triage(args.data), PRESETS[args.preset])
    except (ServerError, WorkloadError, DatasetError, ValueError) as error:
        print(f"sage-sched bench urgency: {error}", file=sys.stderr)
        return 2
    if args.json:
        print_json(rows)
    return 0


def _compare(args: argparse.Namespace, triage: Triage, engine: Engine) -> list[dict[str, Any]]:
    """Says, and gives, the numbers of every arm, one row a seed."""
    arms, say, rows = args.arms or [*ARMS], speaker(args), list[dict[str, Any]]()
    rate = args.rate * _capacity(triage, engine)
    say(
        f"{args.preset}, {rate:.2f} requests/s, {args.num_requests} requests a run, means over "
        f"{args.seeds} seeds. By the expert's levels: seconds waited for each token of the answer."
    )
    with contextlib.ExitStack() as stack:
        serve: _Serve = partial(_simulated, engine)
        if args.on_servers:
            device = Device.named(args.preset, args.speed)
            servers = session_servers(
                args.output, device, triage.foreseen(), SloConfig(trust="body")
            )
            serve = partial(_served, stack.enter_context(KeptServer(servers)))
        for load in args.loads:
            say(f"\n{load}\n\n| policy | level said by | {' | '.join(_COLUMNS)} |")
            say(f"|{'---|' * (2 + len(_COLUMNS))}")
            found: dict[str, NDArray[np.float64]] = {}
            for arm in arms:
                found[arm] = np.array(
                    [
                        _row(args, triage, serve, load, rate, s, *ARMS[arm])
                        for s in range(args.seeds)
                    ]
                )
                cells = " | ".join(f"{value:.4g}" for value in found[arm].mean(axis=0))
                say(f"| `{ARMS[arm][0]}` | {ARMS[arm][1]} | {cells} |", flush=True)
                rows += [
                    {"load": load, "arm": arm, "seed": seed, **dict(zip(_COLUMNS, of, strict=True))}
                    for seed, of in enumerate(found[arm].tolist())
                ]
            for reference in _REFERENCES:
                if reference in found:
                    say(ratios(found, reference), flush=True)
    return rows


def ratios(found: Mapping[str, NDArray[np.float64]], reference: str) -> str:
    """A table of every arm's numbers, shape (seeds, columns), to those of one on the same requests:
    medians over seeds, with the interval of the sign test."""
    lines = [
        f"\n| ratio to `{reference}` | level said by | {' | '.join(_COLUMNS)} |",
        f"|{'---|' * (2 + len(_COLUMNS))}",
    ]
    for arm in found:
        if arm == reference:
            continue
        cells = [with_interval(of_seeds) for of_seeds in (found[arm] / found[reference]).T.tolist()]
        lines.append(f"| `{ARMS[arm][0]}` | {ARMS[arm][1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _simulated(engine: Engine, policy: str, requests: Sequence[SimRequest]) -> Served:
    return simulate(engine, policy, SageConfig(), requests, Options(preempt=True))


def _served(kept: KeptServer, policy: str, requests: Sequence[SimRequest]) -> Served:
    times, _ = served(kept, policy, requests, priority_of)
    return as_seen(kept.device.engine, requests, times)


def priority_of(request: SimRequest) -> int:
    """What a body says so that its request is of its level."""
    return DEFAULT_URGENCY - request.hints.urgency


def _capacity(triage: Triage, engine: Engine) -> float:
    """Requests/s that fcfs sustains: of a burst."""
    num_requests = 300
    drawn = triage.drawn(num_requests, _BURST_SEED)
    levels = said_by("nobody", triage, drawn, _BURST_SEED)
    burst = triage.requests(levels, [0.0] * num_requests, _BURST_SEED)
    result = simulate(engine, "fcfs", SageConfig(), burst)
    return Saturation.measured(result.ttft_s, result.ttlt_s).capacity


def _row(
    args: argparse.Namespace,
    triage: Triage,
    serve: _Serve,
    load: str,
    rate: float,
    seed: int,
    policy: str,
    who: str,
) -> list[float]:
    seed = seed + (0 if args.tuning else _FIRST_SEED)
    drawn = triage.drawn(args.num_requests, seed)
    requests = triage.requests(
        said_by(who, triage, drawn, seed), arrivals_s(load, args.num_requests, rate, seed), seed
    )
    return _numbers(serve(policy, requests), triage.expert[drawn])


def _numbers(result: Served, level: NDArray[np.int64]) -> list[float]:
    """By _COLUMNS; those of levels by what the expert says, shape (requests,)."""
    waited = (result.ttlt_s - result.alone_s) / result.answer_tokens
    urgent = level <= 2
    return [
        float(waited[level == 1].mean()),
        float(waited[urgent].mean()),
        float(np.percentile(waited[urgent], 99)),
        float(waited[~urgent].mean()),
        float(waited.mean()),
        float(result.ttft_s[level == 1].mean()),
        float(result.ttlt_s.mean()),
        float(np.percentile(result.ttlt_s, 99)),
        float(result.answer_tokens.sum()) / result.duration_s,
    ]
