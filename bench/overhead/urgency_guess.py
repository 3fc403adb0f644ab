"""How long a guess at a prompt's urgency takes: `python -m bench.overhead.urgency_guess --data
DIR`. One thread, as in the HTTP process; each prompt once.

By the wall's clock, which on a host with other work counts that too, and by the thread's own time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.overhead.stages import each_ms
from bench.triage.guess import Prompts
from bench.workloads.prompts import WorkloadError
from predictor_store.data.dataset_files import DatasetError


def measure(prompts: Prompts) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of each guess, by what is asked: of the wall, and of the thread."""
    head = prompts.head()
    kinds = {
        "triage": prompts.triage,
        "instructions": prompts.asked,
        "writing tasks": prompts.tasks,
    }
    kinds["all"] = [text for texts in kinds.values() for text in texts]

    def each(texts: Sequence[str], clock: Callable[[], float]) -> list[float]:
        return each_ms(lambda i: head.level(texts[i]), len(texts), clock)

    each(kinds["all"][:100], time.perf_counter)
    return {
        kind: (each(texts, time.perf_counter), each(texts, time.thread_time))
        for kind, texts in kinds.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    try:
        measured = measure(Prompts.read(args.data))
    except (WorkloadError, DatasetError) as error:
        print(f"bench.overhead.urgency_guess: {error}", file=sys.stderr)
        return 2
    print(f"{'ms':16} {'prompts':>8} {'median':>8} {'p99':>8}   of the thread: {'p99':>8}")
    for kind, (wall_ms, thread_ms) in measured.items():
        cells = (np.median(wall_ms), np.quantile(wall_ms, 0.99))
        print(
            f"{kind:16} {len(wall_ms):8} {cells[0]:8.3f} {cells[1]:8.3f} "
            f"{np.quantile(thread_ms, 0.99):24.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
