"""The command: `python -m tests.engine.fuzz --seed S --minutes M [--config NAME ...]`.

It plays random scenarios against real servers, and checks facts that hold at any timing. The
configurations get equal shares of the time. Exit code 1 if it finds something.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from contextlib import closing
from pathlib import Path

from tests.engine.fuzz.configurations import CONFIGURATIONS
from tests.engine.fuzz.judge import Oracle
from tests.engine.fuzz.model import write_spelling_model
from tests.engine.fuzz.trial import Trial, calm_server

_FOLDER = Path("results/fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="without starts of servers")
    parser.add_argument("--config", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--episode", type=int, help="play this one alone, again and again")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # servers end, too
    folder = _FOLDER.absolute()
    model = write_spelling_model(folder / "model")
    found = False
    # Configurations that can share an undisturbed server follow one another.
    chosen = sorted((CONFIGURATIONS[name] for name in args.config), key=lambda one: one.flags)
    for _, alike in itertools.groupby(chosen, key=lambda one: one.flags):
        configurations = list(alike)
        with closing(Oracle(calm_server(configurations[0], model, folder))) as oracle:
            for configuration in configurations:
                with Trial(configuration, model, folder, oracle) as trial:
                    found |= _finds_something(trial, configuration.name, args)
    return int(found)


def _finds_something(trial: Trial, name: str, args: argparse.Namespace) -> bool:
    number, findings = args.episode or 0, list[str]()
    while not findings and trial.played_s < 60 * args.minutes / len(args.config):
        findings = trial.episode(f"{args.seed}/{name}/{number}")
        number += args.episode is None and not findings
    print(f"{name}: {trial.played_s / 60:.1f} minutes, {dict(trial.counts)}")
    for finding in findings[:12]:
        print(f"  - {finding[:1500]}")
    if findings:
        print(
            f"  {len(findings)} findings, logs in {_FOLDER}/{name}-fuzzed/, again (timing decides "
            f"too, so it may take a few) by --config {name} --seed {args.seed} --episode {number}",
            flush=True,
        )
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
