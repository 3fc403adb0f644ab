"""`sage-sched train-probe`: from recorded hidden states to the file of a probe."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from predictor_store.probe.probe_score import Quality
from predictor_store.probe.recording import Recording, RecordingError
from predictor_store.terminal import add_json, print_json, speaker


def configure(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("recording", type=Path, metavar="DIR", help="what probe.record named")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for the probe")
    parser.add_argument(
        "--recipe", choices=("log", "trail"), default="log",
        help="log: bins that double, for sage+; trail: the paper's (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="MAE and CRPS by age, as a picture"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train, write, report; 1 if the recording does not do."""
    from predictor_store.probe.probe_training import RECIPES, TrainingError, train

    say = speaker(args)
    if (args.out.parent / "config.json").exists():
        print(
            f"sage-sched train-probe: --out is {args.out}, in the folder of a model, where SGLang "
            "would take it for weights; allowed: any other folder",
            file=sys.stderr,
        )
        return 1
    try:
        recording = Recording.read(args.recording)
        say(f"{len(recording.ages)} rows of {len(recording.lengths)} answers", flush=True)
        trained = train(recording, RECIPES[args.recipe], say=lambda line: say(line, flush=True))
        trained.probe.write(args.out)
    except (RecordingError, TrainingError, OSError) as error:
        print(f"sage-sched train-probe: {error}", file=sys.stderr)
        return 1
    probe, reading = trained.probe, trained.probe.reading
    say(
        f"{args.out}: layer {probe.layer}, alpha {reading.alpha:g}, beta "
        f"{' '.join(f'{beta:g}' for beta in reading.beta)} by age from "
        f"{' '.join(map(str, reading.band_ages))}, gamma {reading.gamma:g}"
    )
    qualities = {
        "prompt": trained.prompt,
        "probe alone": trained.probe_alone,
        "posterior": trained.posterior,
    }
    say(table(qualities))
    if args.json:
        by_age = {
            name: {age: asdict(score) for age, score in quality.items()}
            for name, quality in qualities.items()
        }
        read_as = {
            "alpha": reading.alpha, "beta": reading.beta.tolist(), "gamma": reading.gamma,
            "band_ages": reading.band_ages.tolist(),
        }  # fmt: skip
        print_json({"layer": probe.layer, **read_as, "by_age": by_age})
    if args.plot is not None:
        plot(qualities, args.plot)
    return 0


def table(qualities: dict[str, Quality]) -> str:
    """Markdown: MAE, CRPS and coverage by age."""
    ages = sorted({age for quality in qualities.values() for age in quality})
    lines = [
        "| MAE · CRPS (tokens) · 80 % interval | "
        + " | ".join(f"age {age}" for age in ages)
        + " |",
        "|---" * (len(ages) + 1) + "|",
    ]
    for name, quality in qualities.items():
        cells = [
            f"{s.mae:.0f} · {s.crps:.1f} · {s.covered:.0%}" if (s := quality.get(age)) else ""
            for age in ages
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(qualities: dict[str, Quality], path: Path) -> None:
    """MAE and CRPS by age."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5))
    for panel, field in zip(panels, ("mae", "crps"), strict=True):
        for name, quality in qualities.items():
            ages = sorted(quality)
            panel.plot(
                [a + 1 for a in ages], [getattr(quality[a], field) for a in ages], "o-", label=name
            )
        panel.set(xscale="log", xlabel="age + 1, tokens", ylabel=f"{field.upper()}, tokens")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
