from __future__ import annotations

import numpy as np

from bench.paper.cases import Case
from bench.paper.runs import Evaluation
from bench.prediction.cold_start import compare, mean_ttlt_s
from bench.prediction.foresight import Foresight
from bench.workloads import synthetic
from predictor_store.predict.embedder import DEFAULT_ENCODER
from predictor_store.predict.general_length import GeneralLength
from predictor_store.predict.history import History
from sage_sched.config import PredictorConfig

WORKLOAD = synthetic.generate(150, seed=0)
CASE = Case(policy="sage", change=(("max_running_requests", 4),), rate=8.0)


def test_the_history_learns_what_has_ended_and_nothing_else() -> None:
    foresight = Foresight(WORKLOAD, PredictorConfig(), len)
    foresight.read(WORKLOAD.evaluation)
    chosen = WORKLOAD.evaluation[:30]
    history = History.of_encoder(DEFAULT_ENCODER, 1000, None)
    seen_s = []
    add = history.add
    history.add = lambda *values: (seen_s.append(values[1]), add(*values))[1]  # type: ignore[method-assign]
    found_s = mean_ttlt_s(CASE, chosen, np.arange(30) / 8.0, foresight, history)
    assert found_s > 0
    assert sorted(seen_s) == sorted(request.output_tokens for request in chosen)
    assert len(history) == 30


def test_all_are_compared_on_the_same_requests() -> None:
    foresight = Foresight(WORKLOAD, PredictorConfig(), len)
    foresight.read(WORKLOAD.evaluation)
    general = GeneralLength.shipped("static")
    found = compare(Evaluation(foresight, 30), CASE, 0, general)
    assert found["warm"] < found["fcfs"]
    assert found["empty"] < found["fcfs"]
