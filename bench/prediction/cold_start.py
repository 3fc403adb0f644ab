"""What an empty history costs: `python -m bench.prediction.cold_start --data DIR`.

In the simulator, under sage: the history learns each answer as it ends, and a request is predicted
when it comes. Both see the same requests. "first come, first served" has no prediction at all, and
what is known of lengths in general was fitted without the prompts of these runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.engines.simulator.presets import PRESETS
from bench.engines.simulator.request import Progress, SimRequest
from bench.engines.simulator.run import make_node
from bench.engines.simulator.state import Options
from bench.paper.cases import Case
from bench.paper.runs import MAX_NEW_TOKENS, PREDICTION_DELAY_S, Evaluation
from bench.prediction.foresight import Foresight, token_counter
from bench.prediction.general import held_out, read_sets
from bench.workloads.prompts import WorkloadError, WorkloadRequest
from bench.workloads.source import load_workload
from predictor_store.data.dataset_files import DatasetError
from predictor_store.predict import predictor
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder
from predictor_store.predict.general_length import GeneralLength
from predictor_store.predict.history import History
from sage_sched.config import SageConfig

_CAPACITY = 10_000
# Of a run; they come again where the load goes on for longer.
_NUM_PROMPTS = 300
_CONFIG = SageConfig()


def mean_ttlt_s(
    case: Case,
    chosen: Sequence[WorkloadRequest],
    arrivals_s: NDArray[np.float64],
    foresight: Foresight,
    history: History,
) -> float:
    """Of these requests, which the history learns from; one that knows nothing predicts nothing."""

    def learn(progress: Progress) -> None:
        ttlt_s.append(progress.last_token_s - progress.request.arrival_s)
        request = progress.request
        vector = foresight.vector(chosen[progress.index].prompt)
        history.add(vector, request.output_tokens, False, "history")
        history.fit()

    ttlt_s: list[float] = []
    options = Options(preempt=case.preempt, prediction_delay_s=PREDICTION_DELAY_S)
    node = make_node(PRESETS[case.engine], case.policy, case.config, options, learn)
    for index, (asked, arrival_s) in enumerate(zip(chosen, arrivals_s.tolist(), strict=True)):
        node.advance(arrival_s)
        vector = foresight.vector(asked.prompt)
        request = SimRequest(
            arrival_s=arrival_s,
            input_tokens=foresight.input_tokens(asked),
            output_tokens=min(asked.output_tokens, MAX_NEW_TOKENS),
            max_new_tokens=MAX_NEW_TOKENS,
            distribution=predictor.predict(history, vector),
            class_name=asked.class_name,
        )
        node.submit(request, index)
    node.advance(math.inf)
    return float(np.mean(ttlt_s))


def compare(
    evaluation: Evaluation, case: Case, seed: int, general: GeneralLength | None
) -> dict[str, float]:
    """Mean TTLT, s, by what the server begins with."""
    foresight = evaluation.foresight
    chosen, arrivals_s = evaluation.chosen(case, seed)

    def measured(policy: str, warm: bool, general: GeneralLength | None) -> float:
        history = History.of_encoder(DEFAULT_ENCODER, _CAPACITY, general)
        for seen in foresight.workload.observations() if warm else ():
            vector = foresight.vector(seen.prompt)
            history.add(vector, seen.output_tokens, False, "warm")
        history.fit()
        served = replace(case, policy=policy)
        return mean_ttlt_s(served, chosen, arrivals_s, foresight, history)

    return {
        "warm": measured("sage", True, general),
        "empty": measured("sage", False, general),
        "empty, nothing shipped": measured("sage", False, None),
        "fcfs": measured("fcfs", False, None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", type=float, default=2.0, help="times what fcfs sustains")
    args = parser.parse_args()
    case = Case(policy="sage", rate=args.load, of_capacity=True, load="sustained")
    try:
        workload = load_workload(args.data)
        foresight = Foresight(workload, _CONFIG.predictor, token_counter())
        foresight.read(workload.evaluation)
        evaluated = {request.prompt for request in workload.evaluation}
        sets = read_sets(args.data, Embedder()).values()
    except (DatasetError, WorkloadError) as error:
        print(f"cold_start: {error}", file=sys.stderr)
        return 2
    general = held_out(sets, _CONFIG.predictor.encoder, evaluated)
    for seed in tqdm(range(args.seeds), unit="seed"):
        found = compare(Evaluation(foresight, _NUM_PROMPTS), case, seed, general)
        ratios = {name: value / found["warm"] for name, value in found.items()}
        shown = ", ".join(f"{n} {found[n]:.1f} s ({ratio:.3f})" for n, ratio in ratios.items())
        print(f"seed {seed}: {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
