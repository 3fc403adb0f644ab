"""A real server exports the dashboard's series, alerts fire, and traces explain requests."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from patches.series import SERIES
from tests.checks.exactness import crowd
from tests.engine import stage
from tests.engine.crowds import ask_together
from tests.engine.serving import LONG_PROMPT, SHORT_PROMPT, SageServer, generate, wait_until
from tests.engine.watch import MONITORING, Watch, samples

# With these step times one long answer is a backlog.
SETTINGS = """
[predictor]
deadline_ms = 5000.0
[step_time]
decode_base_ms = 2000.0
[slo.classes.interactive]
ttft_slo_ms = 3600000.0
tpot_slo_ms = 60000.0
[slo]
default = "interactive"
"""
# They compare CPU times of the scheduler: the host's speed decides whether they fire.
MEASURED = {"SagePlansTakeLong", "SageMovesTakeLong"}
AT_ONCE = {"stop_regex": "(?s)."}  # ends an answer with its first token


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageServer]:
    folder = tmp_path_factory.mktemp("monitored")
    with SageServer(model, folder, flags=["--enable-metrics"], settings=SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def watch(server: SageServer) -> Watch:
    return Watch(server)


def test_no_alert_fires_on_a_healthy_server(server: SageServer, watch: Watch) -> None:
    for _ in range(4):
        assert watch.firing() <= MEASURED
        generate(server, SHORT_PROMPT)
    assert watch.firing() <= MEASURED


def test_the_dashboard_shows_exported_series_and_all_of_ours(server: SageServer) -> None:
    # Of answers that a client ends the first 30 are not scored.
    generate(server, [SHORT_PROMPT] * 100, 128, sampling_params=AT_ONCE)
    dashboard = (MONITORING / "grafana/dashboards/json/sage-dashboard.json").read_text()
    shown = set(re.findall(r"(?:sage|sglang):\w+", dashboard))
    wait_until(lambda: shown <= {sample.name for sample in samples(server)})
    ours = [sample for sample in samples(server) if sample.name.startswith("sage:")]
    names = {re.sub("_(bucket|count|sum|created)$", "", sample.name) for sample in ours}
    # Without `[overload]` no times are predicted, and no request is refused.
    of_overload = {"predicted_time_ratio", "refused_sample_good_ratio"}
    assert names == {f"sage:{name}" for name in SERIES.keys() - of_overload}
    assert all("model_name" in sample.labels for sample in ours)


@contextmanager
def backlog(server: SageServer) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        with stage.held(server):
            answer = pool.submit(generate, server, LONG_PROMPT, 500)
            stage.once(server, num_arrived=1)
            yield
        answer.result()


@contextmanager
def surprises(server: SageServer) -> Iterator[None]:
    """Give answers of one token instead of the predicted 900."""
    generate(server, [LONG_PROMPT] * 60, 950, sampling_params=AT_ONCE)
    yield


@contextmanager
def full_disk(server: SageServer) -> Iterator[None]:
    worker = server.predictor_worker()
    soft, hard = worker.rlimit(psutil.RLIMIT_FSIZE)
    worker.rlimit(psutil.RLIMIT_FSIZE, (1024, hard))
    try:
        generate(server, [SHORT_PROMPT] * 130, 1)
        yield
    finally:
        worker.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def predictions_late(server: SageServer) -> Iterator[None]:
    with server.without_predictions():
        generate(server, [SHORT_PROMPT] * 80)
        yield


@contextmanager
def predictor_down(server: SageServer) -> Iterator[None]:
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(0.02):  # less than a worker takes to start
            with suppress(psutil.NoSuchProcess, ValueError):
                server.predictor_worker().kill()

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        try:
            yield
        finally:
            is_over.set()
        killing.result()


@pytest.mark.parametrize(
    ("alert", "condition"),
    [
        ("SageBacklog", backlog),
        ("SagePredictionsWorthNothing", surprises),
        ("SagePredictionsTooSure", surprises),
        ("SageHistoryNotWritten", full_disk),
        ("SagePredictionsLate", predictions_late),
        ("SagePredictorDown", predictor_down),
    ],
)
def test_an_alert_fires(
    server: SageServer,
    watch: Watch,
    alert: str,
    condition: Callable[[SageServer], AbstractContextManager[None]],
) -> None:
    watch.firing()
    with condition(server):
        wait_until(lambda: alert in watch.firing())


def test_a_trace_explains_requests(yielding: SageServer) -> None:
    trace = yielding.log.parent / "trace.jsonl"
    ask_together(yielding, crowd(12, seed=4))
    generate(yielding, SHORT_PROMPT, rid="the last")
    wait_until(lambda: '"ends","rid":"the last"' in trace.read_text())
    counted = Counter(json.loads(line)["is"] for line in trace.read_text().splitlines())
    stats, num_events = yielding.stats(), counted.total()
    assert counted["preempt"] == stats["preemption"]["num_preemptions"] > 0
    assert counted["ends"] == counted["came"] >= 13
    assert stats["trace"] == {"num_written": num_events, "num_lost": 0, "is_stopped": False}
