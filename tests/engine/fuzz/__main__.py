"""The command: `python -m tests.engine.fuzz --seed S --minutes M [--config NAME ...]`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from tests.engine.fuzz.configurations import CONFIGURATIONS, Configuration
from tests.engine.fuzz.model import write_spelling_model
from tests.engine.fuzz.trial import Trial

_FOLDER = Path("results/fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.fuzz",
        description="Play random scenarios against real servers, and check what must hold whatever "
        "the timing. The time is shared out evenly among the configurations. Exit code 1 if "
        "something is found.",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10.0, help="in all; default: %(default)s")
    parser.add_argument(
        "--config",
        nargs="+",
        choices=CONFIGURATIONS,
        default=list(CONFIGURATIONS),
        metavar="NAME",
        help=f"default: all of {', '.join(CONFIGURATIONS)}",
    )
    parser.add_argument("--episode", type=int, help="play this one alone, again and again")
    parser.add_argument(
        "--keep-going", action="store_true", help="go on after a finding, on a new server"
    )
    args = parser.parse_args()
    model = write_spelling_model(_FOLDER.absolute() / "model")
    share_s = 60 * args.minutes / len(args.config)
    found = [_try(CONFIGURATIONS[name], model, args, share_s) for name in args.config]
    return int(any(found))


def _try(configuration: Configuration, model: Path, args: argparse.Namespace, for_s: float) -> bool:
    """Whether something was found."""
    trial = Trial(configuration, model, _FOLDER.absolute())
    found = False
    progress = tqdm(desc=configuration.name, unit=" episodes", leave=False)
    with progress, trial.servers():
        started_s = time.monotonic()
        deadline_s = started_s + for_s
        number = args.episode or 0
        while time.monotonic() < deadline_s:
            findings = trial.episode(f"{args.seed}/{configuration.name}/{number}")
            progress.set_postfix_str(str(trial.tally))
            progress.update()
            if findings:
                found = True
                tqdm.write(_report(configuration, args.seed, number, findings))
                trial.stop()
                if not args.keep_going:
                    break
            number += args.episode is None
    minutes = (time.monotonic() - started_s) / 60
    print(f"{configuration.name}: {minutes:.1f} minutes, {trial.tally}", flush=True)
    return found


def _report(configuration: Configuration, seed: int, number: int, findings: list[str]) -> str:
    lines = "\n".join(f"  - {finding[:1500]}" for finding in findings[:12])
    more = f"\n  and {len(findings) - 12} more" if len(findings) > 12 else ""
    return (
        f"{configuration.name}, episode {number}: {len(findings)} findings\n{lines}{more}\n"
        f"  logs: {_FOLDER}/{configuration.name}-fuzzed*/\n"
        "  again (timing decides too, so it may take a few): python -m tests.engine.fuzz "
        f"--config {configuration.name} --seed {seed} --episode {number}"
    )


if __name__ == "__main__":
    sys.exit(main())
