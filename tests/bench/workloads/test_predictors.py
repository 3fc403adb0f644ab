from __future__ import annotations

from dataclasses import replace

import pytest

from bench.workloads import chats
from bench.workloads.predictors import Predictors, truth
from predictor_store.predict import predictor
from sage_sched.app.config import PredictorConfig

pytestmark = pytest.mark.slow
SHIPPED, PUBLISHED = PredictorConfig(), PredictorConfig(encoder="minilm", threshold=0.8)


@pytest.fixture(scope="module")
def predictors() -> Predictors:
    workload = chats.generated(150)
    found = Predictors(workload, len)
    found.read(workload.evaluation)
    found.read(workload.evaluation, "minilm")
    return found


def test_the_predictor_is_the_servers(predictors: Predictors) -> None:
    request = predictors.workload.evaluation[0]
    predicted = predictors.semantic(SHIPPED)(request)
    assert predicted is not None
    again = Predictors(predictors.workload, len)
    again.read([request])
    vector = again._vectors["static", request.prompt]
    served = predictor.predict(again.history("static"), vector)
    assert served is not None
    # An embedding's last digits depend on the batch that it was in.
    assert predicted.lengths.tolist() == served.lengths.tolist()
    assert predicted.weights == pytest.approx(served.weights, rel=1e-4)


def test_no_prediction_but_the_truth_depends_on_the_length(predictors: Predictors) -> None:
    request = predictors.workload.evaluation[0]
    other = replace(request, output_tokens=request.output_tokens + 77)
    of_configs = map(predictors.semantic, (SHIPPED, PUBLISHED))
    for predict in (*of_configs, predictors.of_input_length(), predictors.blind()):
        assert predict(request) == predict(other)
    assert truth(request).lengths.tolist() == [request.output_tokens]
