"""The command: `python -m tests.engine.fuzz --seed S --minutes M [--config NAME ...]`."""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from pathlib import Path

from tqdm import tqdm

from tests.engine.fuzz.configurations import CONFIGURATIONS
from tests.engine.fuzz.model import write_spelling_model
from tests.engine.fuzz.oracle import Oracle
from tests.engine.fuzz.trial import Trial, calm_server

_FOLDER = Path("results/fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.fuzz",
        description="Play random scenarios against real servers, and check what must hold whatever "
        "the timing. The time is shared out evenly among the configurations. Exit code 1 if "
        "something is found.",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="of play in all, without the starts of servers; default: %(default)s",
    )
    parser.add_argument(
        "--config",
        nargs="+",
        choices=CONFIGURATIONS,
        default=list(CONFIGURATIONS),
        metavar="NAME",
        help=f"default: all of {', '.join(CONFIGURATIONS)}",
    )
    parser.add_argument("--episode", type=int, help="play this one alone, again and again")
    parser.add_argument("--keep-going", action="store_true", help="go on after a finding")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # servers end, too
    folder = _FOLDER.absolute()
    model = write_spelling_model(folder / "model")
    found = False
    # Configurations that want the same of the undisturbed server come together, and share it.
    chosen = sorted((CONFIGURATIONS[name] for name in args.config), key=lambda one: one.flags)
    for _, alike in itertools.groupby(chosen, key=lambda one: one.flags):
        configurations = list(alike)
        oracle = Oracle(calm_server(configurations[0], model, folder))
        try:
            for configuration in configurations:
                trial = Trial(configuration, model, folder, oracle)
                found |= _try(trial, configuration.name, args)
        finally:
            oracle.close()
    return int(found)


def _try(trial: Trial, name: str, args: argparse.Namespace) -> bool:
    """Whether something was found."""
    found = False
    number = args.episode or 0
    progress = tqdm(desc=name, unit=" episodes", leave=False)
    try:
        with progress:
            while trial.tally.played_s < 60 * args.minutes / len(args.config):
                findings = trial.episode(f"{args.seed}/{name}/{number}")
                progress.set_postfix_str(str(trial.tally))
                progress.update()
                if findings:
                    found = True
                    tqdm.write(_report(name, args.seed, number, findings))
                    if not args.keep_going:
                        break
                number += args.episode is None
    finally:
        trial.stop()
    print(f"{name}: {trial.tally}", flush=True)
    return found


def _report(name: str, seed: int, number: int, findings: list[str]) -> str:
    lines = "\n".join(f"  - {finding[:1500]}" for finding in findings[:12])
    more = f"\n  and {len(findings) - 12} more" if len(findings) > 12 else ""
    return (
        f"{name}, episode {number}: {len(findings)} findings\n{lines}{more}\n"
        f"  logs: {_FOLDER}/{name}-fuzzed*/\n"
        "  again (timing decides too, so it may take a few): python -m tests.engine.fuzz "
        f"--config {name} --seed {seed} --episode {number}"
    )


if __name__ == "__main__":
    sys.exit(main())
