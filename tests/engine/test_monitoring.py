"""Series of a real server: the dashboard's are exported, and each alert fires."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import requests

from patches.series import SERIES
from tests.checks.exactness import crowd
from tests.engine import hardship, stage
from tests.engine.crowds import ask_together
from tests.engine.kinds import CHECKED, YIELDING_FLAGS
from tests.engine.serving import LONG_PROMPT, SHORT_PROMPT, SageServer, generate, wait_until
from tests.engine.watch import ALERTS, MONITORING, Watch, samples

# Step times so long that one long answer is a backlog.
SETTINGS = """
[predictor]
deadline_ms = 5000.0
[step_time]
decode_base_ms = 2000.0
prefill_base_ms = 2000.0
prefill_token_ms = 0.0
[policy.fastserve]
refresh_interval_tokens = 2
quantum_ms = 2000.0
max_preemptions = 1000
[slo]
trust = "header"
[slo.classes.interactive]
ttft_slo_ms = 3600000.0
tpot_slo_ms = 60000.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitored")


@pytest.fixture(scope="module")
def server(folder: Path, model: Path) -> Iterator[SageServer]:
    with SageServer(
        model,
        folder,
        flags=[*YIELDING_FLAGS, "--enable-metrics"],
        env=CHECKED | hardship.install(folder),
        settings=SETTINGS,
    ) as started:
        yield started


@pytest.fixture(scope="module")
def watch(server: SageServer) -> Watch:
    return Watch(server)


def switch(server: SageServer, **changes: object) -> None:
    answer = requests.post(f"{server.url}/sage/settings", json=changes, timeout=300)
    assert answer.status_code == 200, answer.text


def test_on_a_healthy_server_no_alert_fires(server: SageServer, watch: Watch) -> None:
    for _ in range(4):
        assert watch.firing() == set()
        generate(server, SHORT_PROMPT)
    assert watch.firing() == set()


def test_all_that_the_dashboard_shows_is_exported(server: SageServer) -> None:
    headers = {"X-SMG-Priority": "interactive"}
    # Enough answers for the quality of predictions to be reported: the first 30 answers that a
    # client ends do not count.
    body = {"text": [SHORT_PROMPT] * 100, "sampling_params": {"stop_regex": "(?s)."}}
    requests.post(f"{server.url}/generate", json=body, headers=headers, timeout=300)
    dashboard = (MONITORING / "grafana/dashboards/json/sage-dashboard.json").read_text()
    shown = set(re.findall(r"(?:sage|sglang):\w+", dashboard))
    # Series are updated within seconds.
    wait_until(lambda: shown <= {name for name, _, _ in samples(server)})
    exported = {name: labels for name, labels, _ in samples(server)}
    # The dashboard shows all series of ours.
    ours = {name for name in exported if name.startswith("sage:")}
    # Without `[overload]` no times are predicted.
    assert {re.sub("_(bucket|count|sum|created)$", "", name) for name in ours} == {
        f"sage:{name}" for name in SERIES if name != "predicted_time_ratio"
    }
    assert all("model_name" in exported[name] for name in ours)
    assert json.loads(dashboard)["title"] == "sage-sched"


def test_no_series_of_sglangs_is_doubled(server: SageServer) -> None:
    names = {name for name, _, _ in samples(server)}
    assert not {name.removeprefix("sage:") for name in names if name.startswith("sage:")} & {
        name.removeprefix("sglang:") for name in names if name.startswith("sglang:")
    }


@contextmanager
def waits_long(server: SageServer, folder: Path) -> Iterator[None]:
    with ordered(folder, hardship.LONG_WAITS), one_that_waits(server):
        yield


@contextmanager
def backlog(server: SageServer, folder: Path) -> Iterator[None]:
    with one_that_waits(server):
        yield


@contextmanager
def under(server: SageServer, policy: str) -> Iterator[None]:
    switch(server, schedule_policy=policy)
    try:
        yield
    finally:
        switch(server, schedule_policy="sage")


@contextmanager
def policy_errors(server: SageServer, folder: Path) -> Iterator[None]:
    with under(server, hardship.POLICY):
        generate(server, [SHORT_PROMPT] * 8)
        yield


@contextmanager
def slow_plans(server: SageServer, folder: Path) -> Iterator[None]:
    with under(server, hardship.POLICY):
        for _ in range(8):
            generate(server, SHORT_PROMPT)
        yield


@contextmanager
def slow_moves(server: SageServer, folder: Path) -> Iterator[None]:
    with under(server, "fastserve"):
        before = server.stats()["preemption"]["num_preemptions"]
        with ordered(folder, hardship.SLOW_MOVES):
            ask_together(server, crowd(16))
        assert server.stats()["preemption"]["num_preemptions"] - before >= 10
        yield


@contextmanager
def predictor_down(server: SageServer, folder: Path) -> Iterator[None]:
    with ThreadPoolExecutor(1) as pool:
        is_over = threading.Event()

        def kill() -> None:
            while not is_over.wait(0.02):  # less than one takes to start
                for process in psutil.Process(server.pid).children(recursive=True):
                    # Others of the server's end by themselves meanwhile.
                    with suppress(psutil.NoSuchProcess):
                        if "predictor_store.service.worker_process" in process.cmdline():
                            process.kill()
                            process.wait(300)

        killing = pool.submit(kill)
        try:
            yield
        finally:
            is_over.set()
        killing.result()


@contextmanager
def predictions_late(server: SageServer, folder: Path) -> Iterator[None]:
    worker = server.predictor_worker()
    worker.suspend()
    try:
        generate(server, [SHORT_PROMPT] * 80)
        yield
    finally:
        worker.resume()


@contextmanager
def surprises(server: SageServer, folder: Path) -> Iterator[None]:
    """Answers of one token where 900 were predicted."""
    sampling = {"stop_regex": "(?s)."}
    generate(server, [LONG_PROMPT] * 60, 950, sampling_params=sampling)
    yield


@contextmanager
def full_disk(server: SageServer, folder: Path) -> Iterator[None]:
    worker = server.predictor_worker()
    soft, hard = worker.rlimit(psutil.RLIMIT_FSIZE)
    worker.rlimit(psutil.RLIMIT_FSIZE, (1024, hard))
    try:
        generate(server, [SHORT_PROMPT] * 130, 1)
        yield
    finally:
        worker.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def ordered(folder: Path, order: str) -> Iterator[None]:
    hardship.orders_file(folder).write_text(order)
    try:
        yield
    finally:
        hardship.orders_file(folder).write_text(hardship.NOTHING)


@contextmanager
def one_that_waits(server: SageServer) -> Iterator[None]:
    """A request of a long answer, before which the scheduler waits."""
    with ThreadPoolExecutor(1) as pool:
        with stage.held(server):
            answer = pool.submit(generate, server, LONG_PROMPT, 500)
            stage.once_arrived(server, 1)
            yield
        answer.result()


CONDITIONS: dict[str, Callable[[SageServer, Path], AbstractContextManager[None]]] = {
    "SageRequestsWaitLong": waits_long,
    "SageBacklog": backlog,
    "SagePredictionsWorthNothing": surprises,
    "SagePredictionsTooSure": surprises,
    "SageHistoryNotWritten": full_disk,
    "SageMovesTakeLong": slow_moves,
    "SagePolicyErrors": policy_errors,
    "SagePlansTakeLong": slow_plans,
    "SagePredictionsLate": predictions_late,
    "SagePredictorDown": predictor_down,
}


def test_there_is_a_condition_for_each_alert() -> None:
    assert set(CONDITIONS) == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("alert", CONDITIONS)
def test_an_alert_fires(server: SageServer, watch: Watch, folder: Path, alert: str) -> None:
    watch.firing()
    with CONDITIONS[alert](server, folder):
        watch.wait_for(alert)
