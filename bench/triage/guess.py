"""How good the guess at urgency is (`sage-sched urgency train`): `python -m bench.triage.guess
--data DIR`.

Of the triage prompts each is guessed by a model of the other four fifths; beside them it has
learned from instructions of no level. Of further instructions, and of writing tasks with and
without "URGENT!!!" before them, the model of all is asked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.triage.requests import LABELS, rows_with
from bench.workloads.prompts import WorkloadError
from predictor_store.data.dataset_files import DatasetError
from predictor_store.urgency.urgency_command import report
from predictor_store.urgency.urgency_head import UNDER_COST, UrgencyHead, fit

INSTRUCTIONS, TASKS = "alpaca_davinci003.jsonl.gz", "prompts_document_write.jsonl.gz"
_NUM_LEARNED, _NUM_ASKED = 1_000, 1_500
_SHOUT = "URGENT!!! "


@dataclass(frozen=True, slots=True)
class Prompts:
    """triage, expert, nurse: prompts and their levels by whom. learned: others that a model learns
    from; asked, tasks: others that it has not seen."""

    triage: list[str]
    expert: list[int]
    nurse: list[int]
    learned: list[str]
    asked: list[str]
    tasks: list[str]

    @classmethod
    def read(cls, folder: Path) -> Prompts:
        """Raises WorkloadError, DatasetError."""
        labelled = rows_with(folder / LABELS, "prompt", "urgency_ktas", "urgency_nurse")
        instructions, tasks = (
            list(dict.fromkeys(str(row["prompt"]) for row in rows_with(folder / name, "prompt")))
            for name in (INSTRUCTIONS, TASKS)
        )
        if not labelled or not tasks or len(instructions) < 2:
            raise WorkloadError(f"{folder} has no rows in {LABELS}, {INSTRUCTIONS} or {TASKS}")
        order = np.random.default_rng(0).permutation(len(instructions))
        shuffled = [instructions[i] for i in order.tolist()]
        num_learned = min(_NUM_LEARNED, len(shuffled) // 2)
        return cls(
            triage=[str(row["prompt"]) for row in labelled],
            expert=[int(row["urgency_ktas"]) for row in labelled],
            nurse=[int(row["urgency_nurse"]) for row in labelled],
            learned=shuffled[:num_learned],
            asked=shuffled[num_learned : num_learned + _NUM_ASKED],
            tasks=tasks[:_NUM_ASKED],
        )

    def head(self, learns_others: bool = True) -> UrgencyHead:
        """A model of the triage prompts, and of those of no level if it learns from them."""
        others = self.learned if learns_others else []
        levels = [*self.expert, *[None] * len(others)]
        return fit([*self.triage, *others], levels, UNDER_COST)[0]


def urgent_share(head: UrgencyHead, texts: Sequence[str]) -> tuple[float, float]:
    """Of these, the share of which is guessed to be of level 1 or 2; the mean probability of it."""
    flagged = np.mean([head.level(text) <= 2 for text in texts])
    return float(flagged), float(np.mean([head.probabilities(text)[:2].sum() for text in texts]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    try:
        prompts = Prompts.read(args.data)
    except (WorkloadError, DatasetError) as error:
        print(f"bench.triage.guess: {error}", file=sys.stderr)
        return 2
    urgent, by_nurse = (np.array(levels) <= 2 for levels in (prompts.expert, prompts.nurse))
    found = by_nurse[urgent].mean()
    print(f"A nurse: {found:.2f} of levels 1 and 2 found, {by_nurse.mean():.2f} of all flagged.")
    for learns_others in (True, False):
        head = prompts.head(learns_others)
        others = f"{len(prompts.learned)} instructions of no level" if learns_others else "no other"
        print(f"\nA model of {len(prompts.triage)} triage prompts and {others}\n")
        print(report(head.confusion))
        print("\n| not triage, not learned from | prompts | flagged | mean probability |")
        print("|---|---|---|---|")
        for name, texts in (("instructions", prompts.asked), ("writing tasks", prompts.tasks)):
            for shout in ("", _SHOUT):
                flagged, mean = urgent_share(head, [shout + text for text in texts])
                print(f"| {shout}{name} | {len(texts)} | {flagged:.4f} | {mean:.4f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
