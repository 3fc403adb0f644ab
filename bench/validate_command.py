"""sage-sched bench validate: does the simulator say what the real engine did?"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from tqdm import tqdm

from bench.command import load_workload
from bench.plots import STYLE, colors
from bench.predictions import Foresight
from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.stats import ordered
from bench.workload import WorkloadError, sample
from patches.config_file import read_config
from sage_sched.config import ConfigError, SageConfig
from sage_sched.policy import policy_names
from sage_sched.step_time import StepTime

mpl.use("Agg")

import matplotlib.pyplot as plt

# SGLang's choice on a host without a GPU (its start-up log).
_CPU_CHUNKED_PREFILL_SIZE = 4096
# The batch, and so the time per token, changes with the pace.
_PACE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Point:
    """Mean TTLT of one run, on the engine and in the simulator.

    simulated_s: with the step times given. paced_s: with them times pace, so that the median time
    per output token is the run's own: what is left is how well the simulator knows who waits for
    whom, on a host whose speed is another from run to run.
    """

    policy: str
    rate: str
    seed: int
    measured_s: float
    simulated_s: float
    paced_s: float
    pace: float


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, help="runs.jsonl of a comparison (sage-sched bench)")
    parser.add_argument(
        "--step-time", required=True, metavar="FILE", help="what sage-sched bench fit has written"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="as of the comparison")
    parser.add_argument("--output", type=Path, default=Path("results/validate"), metavar="DIR")


def run(args: argparse.Namespace) -> int:
    """0; 2, with a line on stderr, where nothing can be compared."""
    try:
        points = compare(read_runs(args.runs), read_config(args.step_time), args.data)
    except (ConfigError, WorkloadError, OSError, ValueError) as error:
        print(f"sage-sched bench validate: {error}", file=sys.stderr)
        return 2
    args.output.mkdir(parents=True, exist_ok=True)
    plot(points, args.output / "validate.svg")
    print(table(points))
    print(f"\nplot: {args.output / 'validate.svg'}")
    return 0


def read_runs(file: Path) -> list[dict[str, Any]]:
    """The valid runs. Raises ValueError where there is none."""
    runs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    valid = [run for run in runs if run["valid"]]
    if not valid:
        raise ValueError(f"{file} has no valid run")
    return valid


def compare(runs: Sequence[dict[str, Any]], config: SageConfig, data: Path | None) -> list[Point]:
    """Each run's requests, arrivals and lengths, simulated with the settings it ran with but for
    the step times, which are config's."""
    workload = load_workload(data)
    foresight = Foresight(workload, config.predictor, len)
    by_run = [sample(workload.evaluation, len(r["requests"]["class"]), r["seed"]) for r in runs]
    foresight.read([request for chosen in by_run for request in chosen])
    predict = foresight.semantic()
    points = []
    for run, chosen in zip(tqdm(runs, desc="simulating"), by_run, strict=True):
        ours = run["policy"] in policy_names()
        columns = run["requests"]
        if columns["class"] != [request.class_name for request in chosen]:
            raise ValueError("the runs are of another workload: give --data as the comparison had")
        requests = [
            SimRequest(
                arrival_s=columns["sent_ms"][i] / 1e3,
                input_tokens=columns["input_tokens"][i],
                output_tokens=columns["output_tokens"][i],
                max_new_tokens=run["settings"]["max_new_tokens"],
                distribution=predict(request) if ours else None,
                class_name=request.class_name,
            )
            for i, request in enumerate(chosen)
        ]
        requests.sort(key=lambda request: request.arrival_s)
        ran = replace(SageConfig.parse(run["settings"]["sage"]), step_time=config.step_time)
        turns = Options(preempt=ran.preemption.enabled, max_yields=ran.preemption.max_yields)
        engine = engine_of(run["settings"], config)
        means_s, pace = _at_its_pace(
            engine,
            partial(
                simulate, policy_name=run["policy"], config=ran, requests=requests, options=turns
            ),
            [request.output_tokens for request in requests],
            run["median_tpot_ms"] / 1e3,
        )
        points.append(
            Point(
                run["policy"], run["rate"], run["seed"],
                run["mean_e2e_latency_ms"] / 1e3, *means_s, pace,
            )
        )  # fmt: skip
    return points


def _at_its_pace(
    engine: Engine,
    simulated: Callable[[Engine], Result],
    output_tokens: Sequence[int],
    median_tpot_s: float,
) -> tuple[tuple[float, float], float]:
    """Mean TTLT with the engine's step times, and with these times a pace; that pace."""
    steps = np.array(output_tokens) - 1
    coefficients = astuple(engine.step_time)
    result, pace = simulated(engine), 1.0
    first_s = float(result.ttlt_s.mean())
    for _ in range(_PACE_ROUNDS):
        tpots_s = (result.ttlt_s - result.ttft_s)[steps > 0] / steps[steps > 0]
        pace *= median_tpot_s / float(np.median(tpots_s))
        step_time = StepTime(*(coefficient * pace for coefficient in coefficients))
        result = simulated(replace(engine, step_time=step_time))
    return (first_s, float(result.ttlt_s.mean())), pace


def engine_of(settings: dict[str, Any], config: SageConfig) -> Engine:
    """The engine that a run's server flags describe."""
    flags = shlex.split(settings["server flags"])
    values = dict(pairwise(flags))
    env = settings["server environment"]
    return Engine(
        step_time=config.step_time.step_time(),
        kv_pool_tokens=int(values["--max-total-tokens"]),
        max_running_requests=int(values["--max-running-requests"]),
        page_size=int(values.get("--page-size", 1)),
        chunked_prefill_size=int(values.get("--chunked-prefill-size", _CPU_CHUNKED_PREFILL_SIZE)),
        schedule_conservativeness=float(values.get("--schedule-conservativeness", 1.0)),
        clip_max_new_tokens=int(env.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", 4096)),
    )


def table(points: Sequence[Point]) -> str:
    """By rate and policy, medians over seeds; then the order of the policies, either way."""
    lines = [
        f"{'rate':>6}  {'policy':24} {'measured s':>10} {'simulated s':>11} {'ratio':>6} "
        f"{'at its pace s':>13} {'ratio':>6} {'pace':>6}"
    ]
    for rate in ordered(point.rate for point in points):
        medians = {}
        for policy in ordered(point.policy for point in points if point.rate == rate):
            mine = [p for p in points if (p.rate, p.policy) == (rate, policy)]
            measured, simulated, paced, *ratios, pace = np.median(
                [
                    (p.measured_s, p.simulated_s, p.paced_s,
                     p.simulated_s / p.measured_s, p.paced_s / p.measured_s, p.pace)
                    for p in mine
                ],
                axis=0,
            )  # fmt: skip
            medians[policy] = (measured, simulated, paced)
            lines.append(
                f"{rate:>6}  {policy:24} {measured:10.2f} {simulated:11.2f} {ratios[0]:6.2f} "
                f"{paced:13.2f} {ratios[1]:6.2f} {pace:6.2f}"
            )
        for i, name in enumerate(("measured", "simulated", "at its pace")):
            order = sorted(medians, key=lambda policy: float(medians[policy][i]))
            lines.append(f"order {name + ':':12} {' < '.join(order)}")
    return "\n".join(lines)


def plot(points: Sequence[Point], file: Path) -> None:
    """Simulated against measured mean TTLT, with the 15 % band: a ring a run with the step times
    given, a disc at the run's own pace."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6, 5.4), layout="constrained")
        for policy, color in colors(ordered(point.policy for point in points)).items():
            mine = [point for point in points if point.policy == policy]
            measured_s = [point.measured_s for point in mine]
            axis.scatter(
                measured_s, [point.simulated_s for point in mine], s=18, facecolors="none",
                edgecolors=color,
            )  # fmt: skip
            axis.scatter(
                measured_s, [point.paced_s for point in mine], s=18, color=color, label=policy
            )
        simulated_s = [s for point in points for s in (point.simulated_s, point.paced_s)]
        both_s = [*simulated_s, *(point.measured_s for point in points)]
        ends = np.array([0.8 * min(both_s), 1.25 * max(both_s)])
        axis.plot(ends, ends, color="#444", lw=1)
        axis.fill_between(ends, ends * 0.85, ends * 1.15, color="#444", alpha=0.1, lw=0)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("mean TTLT on the engine, s (log)")
        axis.set_ylabel("mean TTLT in the simulator, s (log); disc: at the run's pace")
        axis.legend(fontsize=8)
        figure.savefig(file)
        plt.close(figure)
