"""Implements `sage-sched whatif`, which simulates your own traffic under other policies."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.policies.rival import Rival, policy_argument
from bench.policies.srpt_oracle import ORACLE
from bench.simulator.presets import PRESETS
from bench.simulator.stock import STOCK
from bench.whatif.answer import Answer, answer_of
from bench.whatif.comparison import endings, good_table, sentence, table
from bench.whatif.engine import OwnServer, of_file, of_preset, of_running
from bench.whatif.log import TrafficLog
from bench.whatif.read import MOST_REQUESTS, read_log
from bench.whatif.simulation import Slo
from predictor_store.ask_server import add_key, key_of
from predictor_store.config_file import read_config
from predictor_store.data.warm import load_tokenizer
from predictor_store.logs.options import add_options, read_options
from predictor_store.terminal import (
    add_json,
    at_least_one,
    can_plot,
    print_json,
    printable,
    server_url,
    speaker,
)
from sage_sched.app.registry import policy_names, policy_type
from sage_sched.errors import UserError
from sage_sched.fields import ConfigError
from sage_sched.steps import StepTime

# SGLang's policies as tuned best under most loads (docs/results.md), and ours.
DEFAULT_POLICIES = (
    "fcfs", "fcfs@clip=256", "fcfs@conservativeness=0.1", "shortest-prefill-first@clip=256",
    "fcfs-fill", "sage",
)  # fmt: skip
OURS = "sage"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Simulates a log of your own traffic under your policy, others of SGLang, and ours."
    )
    parser.add_argument(
        "log", nargs="+", type=Path, metavar="LOG",
        help="files or folders of logs, in any format that `sage-sched formats` lists",
    )  # fmt: skip
    add_options(parser)
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument(
        "--server",
        type=server_url,
        metavar="URL",
        help="your server, which gives its memory, flags and step times",
    )
    engine.add_argument(
        "--server-info", type=Path, metavar="FILE", help="a saved answer of its /server_info"
    )
    engine.add_argument(
        "--preset", choices=PRESETS, help="an engine from data sheets, if there is no server"
    )
    add_key(parser, "--server, if it has an --api-key")
    parser.add_argument("--step-time", metavar="FILE", help="a file from `sage-sched bench fit`")
    parser.add_argument(
        "--policy", type=simulated_policy, metavar="NAME",
        help="your policy, such as fcfs or fcfs@conservativeness=0.3,clip=1024 "
        "(docs/benchmarking.md). Default: the server's, or fcfs",
    )  # fmt: skip
    parser.add_argument(
        "--policies", nargs="+", type=simulated_policy, default=DEFAULT_POLICIES, metavar="NAME",
        help=f"the policies to compare it with (default: {' '.join(DEFAULT_POLICIES)})",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, metavar="N",
        help="the cap of requests without one in the log (default: tries both the longest "
        "answer's length and the rest of the context)",
    )  # fmt: skip
    parser.add_argument(
        "--load", type=_factor, default=1.0, metavar="X", help="requests arrive X times as fast"
    )
    parser.add_argument(
        "--multiples", nargs="+", type=_factor, default=(1.0, 1.25, 1.5, 2.0, 3.0), metavar="X",
        help="count good requests at these multiples of the log's rate (default: 1 1.25 1.5 2 3)",
    )  # fmt: skip
    parser.add_argument(
        "--ttft-ms", type=_factor, default=2000.0, metavar="MS",
        help="a request is good if its first token comes within this (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--tpot-ms", type=_factor, default=100.0, metavar="MS",
        help="and if its further tokens take at most this each, on average (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=at_least_one, metavar="N",
        help=f"read only the first N requests (default: {MOST_REQUESTS})",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=at_least_one, default=3,
        help="the number of seeds of supposed predictions, for logs without prompts "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--store", type=Path, metavar="DIR",
        help="the store that the predictor begins with; it must not have this log's answers "
        "(default: only the coefficients of the package)",
    )  # fmt: skip
    parser.add_argument("--sage-config", metavar="FILE", help="settings of our policies")
    parser.add_argument(
        "--rate", type=_factor, metavar="R",
        help="requests/s at which arrivals are drawn (Poisson) if the log has none",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", metavar="MODEL_PATH",
        help="reads prompts that are token ids, and counts texts if the log has no lengths",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=Path("results/whatif"), metavar="DIR",
        help="the folder for picture and summary (default: %(default)s)",
    )  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer. Raises UserError and OSError if there is none."""
    config = read_config(args.sage_config)
    server = _server(args)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    _prepare(args.output)
    log = read_log(args.log, tokenizer, read_options(args), args.limit, args.rate)
    say = speaker(args)
    say("\n".join(map(printable, log.lines)), flush=True)
    answer = answer_of(
        log, server, _policies(args, server), config,
        load=args.load, cap_tokens=args.max_new_tokens, store=args.store, num_seeds=args.seeds,
        multiples=sorted(set(args.multiples)), slo=Slo(args.ttft_ms, args.tpot_ms),
    )  # fmt: skip
    say("\n".join(map(printable, answer.notes)))
    say(f"\nRatios to {answer.rows[0].policy}, with intervals of 90 %.")
    for caps, found in answer.tables.items():
        say(f"\n{caps}\n" if caps else "")
        say(table(found.rows))
        say(f"{endings(found.ended_s, OURS)}\n".lstrip("\n"))
        if said := sentence(found.rows, OURS):
            say(said)
    say(
        f"\nShare of good requests (TTFT within {args.ttft_ms:g} ms, mean TPOT within "
        f"{args.tpot_ms:g} ms), by multiples of the log's rate:\n"
    )
    say(good_table(answer.good, answer.multiples))
    if args.json:
        print_json(_summary(log, answer))
    sys.stdout.flush()
    try:
        picture = _write(log, answer, args.output)
    except OSError as error:
        raise UserError(f"no picture: {error}") from error
    if picture is not None:
        say(f"\npicture: {picture}")
    return 0


def _prepare(folder: Path) -> None:
    """Check before the simulations that the folder can be written to. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _server(args: argparse.Namespace) -> OwnServer:
    step_time = read_step_time(args.step_time) if args.step_time else None
    if args.server:
        return of_running(args.server, step_time, key_of(args.key_file))
    if args.server_info:
        return of_file(args.server_info, step_time)
    return of_preset(args.preset, step_time)


def _policies(args: argparse.Namespace, server: OwnServer) -> list[str]:
    """Return the policies to compare, the operator's own first."""
    own = args.policy or server.policy or "fcfs"
    return list(dict.fromkeys([own, *args.policies]))


def _summary(log: TrafficLog, answer: Answer) -> dict[str, Any]:
    """Return the summary for --json.

    rows, ended_s: of the first table (see Answer and Comparison).
    without_caps, without_caps_ended_s: of the table without caps; None if the log gives caps.
    """
    first, *others = answer.tables.values()
    return {
        "log": log.lines,
        "notes": answer.notes,
        "rows": [asdict(row) for row in first.rows],
        "ended_s": first.ended_s,
        "without_caps": [asdict(row) for row in others[0].rows] if others else None,
        "without_caps_ended_s": others[0].ended_s if others else None,
        "multiples": [*answer.multiples],
        "good_share": answer.good,
    }


def _write(log: TrafficLog, answer: Answer, folder: Path) -> Path | None:
    text = json.dumps(_summary(log, answer), indent=2) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
    if not can_plot():
        return None
    from bench.whatif.plot import ratios_to_first  # matplotlib takes a second to load

    picture = folder / "whatif.svg"
    picture.write_text(ratios_to_first(answer.rows, "\n".join(answer.notes[:2])), encoding="utf-8")
    return picture


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def read_step_time(file: str) -> StepTime:
    """Return the step times that `sage-sched bench fit` has written. Raises ConfigError."""
    section = read_config(file).step_time
    if section is None:
        raise ConfigError(f"{file} has no section step_time")
    return section.step_time()


def simulated_policy(text: str) -> str:
    """Return a policy of the command line, after a check that the simulator has it."""
    name = Rival.parse(policy_argument(text)).policy
    if name in (*STOCK, ORACLE):
        return text
    if name not in policy_names():
        known = ", ".join([*STOCK, *policy_names()])
        raise argparse.ArgumentTypeError(f"unknown policy {name!r}, allowed: {known}")
    try:
        policy_type(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
