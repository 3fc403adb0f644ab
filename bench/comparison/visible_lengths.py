"""What a benchmark that shows lengths flatters: `python -m bench.comparison.visible_lengths`.

SGLang's own benchmark asks for exactly the recorded length of each answer (ignore_eos, and
max_new_tokens of that length), which stock admission then sets aside in full and our policies cut
their predictions at. Real clients send a cap. Both are simulated here, on the same requests: means
over seeds of mean TTLT in seconds, and their ratio to `fcfs`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.engines.simulator.request import SimRequest
from bench.paper.cases import Case
from bench.paper.runs import Evaluation
from bench.prediction.foresight import Foresight, token_counter
from bench.workloads.source import load_workload
from sage_sched.config import PredictorConfig

_POLICIES = ("fcfs", "fcfs@clip=256", "shortest-prefill-first@clip=256", "sage")
# SGLang then expects all of max_new_tokens: its share at first, 0.7, times this is 1.
_IN_FULL = 1 / 0.7


def visible(requests: Sequence[SimRequest]) -> list[SimRequest]:
    """The same requests, each asking for just the tokens that it will get."""
    return [replace(request, max_new_tokens=request.output_tokens) for request in requests]


def mean_ttlt_s(evaluation: Evaluation, policy: str, rate: float, seed: int, shown: bool) -> float:
    """Of one run, at `rate` times what fcfs sustains under caps."""
    case = Case(policy=policy, rate=rate, of_capacity=True, load="sustained")
    requests = evaluation.requests(case, seed)
    if shown:
        case = replace(case, change=(("schedule_conservativeness", _IN_FULL),))
        requests = visible(requests)
    return evaluation.outcome_of(case, requests)["mean_ttlt_s"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.comparison.visible_lengths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="default: generated prompts")
    parser.add_argument("--rate", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--num-requests", type=int, default=900, help="default: %(default)s")
    args = parser.parse_args(argv)
    foresight = Foresight(load_workload(args.data), PredictorConfig(), token_counter())
    evaluation = Evaluation(foresight, args.num_requests)
    evaluation.read([Case(policy="sage")], args.seeds)
    print(f"{'policy':34}{'hidden':>8}{'ratio':>7}{'visible':>9}{'ratio':>7}")
    first: list[float] = []
    for policy in _POLICIES:
        found = [
            float(np.mean([mean_ttlt_s(evaluation, policy, args.rate, seed, shown)
                           for seed in range(args.seeds)]))
            for shown in (False, True)
        ]  # fmt: skip
        first = first or found
        (hidden, hidden_ratio), (shown_s, shown_ratio) = [
            (seconds, seconds / base) for seconds, base in zip(found, first, strict=True)
        ]
        print(f"{policy:34}{hidden:8.1f}{hidden_ratio:7.2f}{shown_s:9.1f}{shown_ratio:7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
