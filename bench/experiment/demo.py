"""Implements `sage-sched demo`: serves the same requests under SGLang's tuned policies and ours.

It first simulates all of them, for a report within a minute or two. Then real servers with a
modelled GPU's step times serve the best of SGLang's and ours, if the host can do that in time. The
prompts come from templates, and the lengths of their answers from a real model.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from types import FrameType

import numpy as np

from bench.experiment.lanes import Lane, picture, svg
from bench.experiment.pace import Pace
from bench.experiment.records import Provenance, Record
from bench.experiment.report import html_table, write_page
from bench.experiment.run import best_tuned, record_of, served_by
from bench.experiment.run import run as run_experiment
from bench.experiment.simulated import Loaded, served
from bench.experiment.spec import Experiment, Options
from bench.experiment.stats import against, median, of_arm
from bench.experiment.table import plain
from bench.policies.arm import Arm
from bench.policies.rival import by_arrival
from predictor_store.terminal import at_least_one

OURS = "sage"
# The whole demo ends within this time and some seconds.
BUDGET_S = 600.0
# The mean step of the modelled GPU in a run.
_DEVICE_STEP_S = 0.043


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--simulate", action="store_true", help="use only the simulator: a minute, and no server"
    )
    parser.add_argument("--seeds", type=at_least_one, help="how many runs of each policy (3)")
    parser.add_argument(
        "--output", type=Path, default=Path("results"), metavar="DIR",
        help="DIR/demo gets report and runs (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Return 0: there is always a report, if need be a simulated one."""
    end_s = time.monotonic() + BUDGET_S
    experiment = Experiment.read("demo")
    experiment = replace(experiment, seeds=args.seeds or experiment.seeds)
    loaded = Loaded(experiment.loads[0], None)
    print("simulated first: SGLang's policies are tuned, and compared with ours", flush=True)
    rivals, capacity = _rivals(experiment, loaded)
    experiment = replace(experiment, arms=[*rivals, *experiment.arms], tuned=None)
    simulated = run_experiment(replace(experiment, engine="sim"), Options(), lambda _: None)
    best = _best_of_sglang(experiment, simulated)
    experiment = replace(experiment, reference=best.name)
    page = Page(experiment, loaded, best, capacity, simulated, args.output)
    if args.simulate:
        page.show([], "")
        return 0
    page.show([], "Real servers come next, and then this page shows them.")
    found, why = _on_servers(experiment, loaded, best, simulated, args.output, end_s)
    page.show(found, why and f"There is no comparison on real servers: {why}.")
    return 0


class Page:
    """Shows the comparison as a page and in the terminal, simulated or on real servers."""

    def __init__(
        self,
        experiment: Experiment,
        loaded: Loaded,
        best: Arm,
        capacity: float,
        simulated: Sequence[Record],
        output: Path,
    ) -> None:
        self._experiment, self._loaded, self._best = experiment, loaded, best
        self._capacity, self._simulated = capacity, simulated
        self._file = output / experiment.name / "report.html"

    def show(self, found: Sequence[Record], note: str) -> None:
        """Show valid runs on servers; the simulated ones alone if there are none. note: further
        text."""
        experiment, load = self._experiment, self._experiment.loads[0].name
        best = self._best.name
        summary = sentence(found or self._simulated, load, best)
        if not found:
            summary = f"Simulated: {summary}"
        lanes = [_lane(self._loaded, arm, found) for arm in (self._best, Arm(policy=OURS))]
        shown = [*found, *self._simulated]
        texts = [_setup(experiment, found), _limit(self._capacity)]
        write_page(
            self._file,
            "What scheduling is worth where requests queue",
            [
                *(f"<p><b>{escape(text)}</b></p>" for text in (summary, note) if text),
                picture(lanes),
                html_table(experiment, shown),
                *(f"<p>{text}</p>" for text in texts),
            ],
        )
        self._file.with_name("lanes.svg").write_text(svg(lanes), encoding="utf-8")
        print(f"\n{plain(experiment, shown)}\n\n" + "\n".join(texts))
        print("\n".join(["", summary, *filter(None, [note]), f"report: {self._file}"]), flush=True)


def sentence(valid: Sequence[Record], load: str, best: str) -> str:
    """Return the summary of valid records. best: the arm of SGLang to which ratios refer."""
    arms = of_arm(valid, load, OURS), of_arm(valid, load, best)
    ours_s, theirs_s = (median(arm, "mean_e2e_latency_ms") / 1e3 for arm in arms)
    good = [round(100 * median(arm, "good_share")) for arm in arms]
    theirs = f"SGLang's best tuned policy ({best})"
    return (
        f"{against(OURS, ours_s, theirs, theirs_s)}. Of 100 requests {good[0]} were good under "
        f"{OURS}, and {good[1]} under SGLang's: the first token within 2 s, and then at most "
        "100 ms per token."
    )


def _rivals(experiment: Experiment, loaded: Loaded) -> tuple[list[Arm], float]:
    """Tune each of SGLang's policies in the simulator, on other requests. Return the tuned policies
    and the requests per second that the best of them sustains."""
    assert experiment.tuned is not None
    arms = [
        best_tuned(replace(experiment, tuned=replace(experiment.tuned, policies=[policy])), loaded)
        for policy in experiment.tuned.policies
    ]
    print("what SGLang at its best sustains:", end=" ", flush=True)
    admissions = {by_arrival(arm.policy) for arm in arms}
    capacity = max(
        Loaded(replace(loaded.load, capacity_by=policy), None, None).saturated.capacity
        for policy in sorted(admissions)
    )
    print(f"{capacity:.1f} requests/s; {loaded.rate_per_s:.1f} arrive, so they queue", flush=True)
    return arms, capacity


def _on_servers(
    experiment: Experiment,
    loaded: Loaded,
    best: Arm,
    simulated: Sequence[Record],
    output: Path,
    end_s: float,
) -> tuple[list[Record], str]:
    """Return valid runs of both policies on real servers. If there are none, return why."""
    arms = [best, Arm(policy=OURS)]
    of_arms = [record for arm in arms for record in of_arm(simulated, loaded.load.name, arm.name)]
    pace, why = None, "this host is too slow for it to take less than ten minutes"
    try:
        with _until(end_s), contextlib.ExitStack() as stack:
            print("\nloading SGLang, and measuring the host", flush=True)
            from bench.engines.clock.host import speed_for, step_times_s
            from bench.experiment.servers import Servers

            speed = speed_for(step_times_s(), _DEVICE_STEP_S)
            servers = Servers(
                replace(experiment, arms=arms, engine="clock", speed=speed),
                loaded, Options(output=output), num_tries=1,
            )  # fmt: skip
            stack.callback(servers.close)
            made_by, clock = Provenance.of_now(), replace(experiment, engine="clock")

            def serve(speed: float, arm: Arm, seed: int) -> Record:
                servers.set_speed(speed)
                outcome = served_by(servers, clock, loaded, arm, seed)
                return record_of(clock, loaded.load.name, outcome, made_by)

            run_s = max(record.metrics["duration"] for record in of_arms)
            pace = Pace(serve, speed, run_s, end_s - time.monotonic(), _say)
            pace.compare(arms, experiment.all_seeds)
    except _TimeUpError:
        why = "it was not done in ten minutes"
    except Exception as error:  # the simulated report stays in any case
        why = (str(error) or repr(error)).strip().rstrip(".")
        _say(f"the runs on real servers ended early: {why}")
    found = pace.found(arms) if pace is not None else []
    return found, "" if found else why


class _TimeUpError(KeyboardInterrupt):
    """The time is up. As a KeyboardInterrupt it also ends asyncio's loop."""


@contextlib.contextmanager
def _until(end_s: float) -> Iterator[None]:
    """Raise _TimeUpError in the block at end_s, a time of time.monotonic."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _TimeUpError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, end_s - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _say(text: str) -> None:
    print(text, flush=True)


def _best_of_sglang(experiment: Experiment, valid: Sequence[Record]) -> Arm:
    load = experiment.loads[0].name

    def mean(arm: Arm) -> float:
        return median(of_arm(valid, load, arm.name), "mean_e2e_latency_ms")

    return min((arm for arm in experiment.arms if arm.name != OURS), key=mean)


def _lane(loaded: Loaded, arm: Arm, found: Sequence[Record]) -> Lane:
    """Return the lane of an arm's first run on servers; of a simulated one if there is none."""
    if runs := of_arm(found, loaded.load.name, arm.name):
        columns = runs[0].about["requests"]
        names = ("sent_ms", "ttft_ms", "e2e_latency_ms")
        arrival, first, last = (np.array(columns[name], float) / 1e3 for name in names)
        pauses, waited_s = columns["pauses_s"], median(runs[:1], "mean_waited_s")
    else:
        result = served(loaded.load, arm, loaded.requests(arm, 0))
        arrival, first, last = result.arrival_s, result.ttft_s, result.ttlt_s
        pauses, waited_s = result.pauses_s, result.metrics()["mean_waited_s"]
    title = f"{arm.name}: requests waited {waited_s:.0f} s on average"
    return Lane(title, arrival, arrival + first, arrival + last, pauses, is_ours=arm.name == OURS)


def _setup(experiment: Experiment, found: Sequence[Record]) -> str:
    load = experiment.loads[0]
    where = "Simulated"
    if found:
        seeds = len({record.seed for record in found})
        where = (
            f"By device clock ({seeds} seeds): real SGLang servers with a small model, whose steps "
            "take as long as on the modelled GPU (no GPU was measured). Simulated and real"
        )
    return (
        f"{where}: {load.preset} with room for {load.engine['kv_pool_tokens']:,} tokens of KV, "
        f"{load.rate} requests/s. Medians over {experiment.seeds} seeds; ratios are to "
        f"{experiment.reference}, paired by seed. The prompts are generated; the lengths of their "
        "answers are a real model's own (SmolLM2-135M-Instruct, temperature 0.7)."
    )


def _limit(capacity: float) -> str:
    return (
        f"If no request waits, no order can help: below {capacity:.1f} requests/s, which SGLang at "
        "its best sustains here, all of these policies answer about equally fast."
    )
