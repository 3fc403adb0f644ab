from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from predictor_store.service.link import Link, PredictorError, connect_worker
from predictor_store.service.supervisor import SharedWorker, Supervisor
from sage_sched.config import PredictorConfig, SageConfig, StoreConfig


class Opened:
    """In the place of a Link. It knows whether it was ended."""

    was_killed = was_closed = False

    def kill(self) -> None:
        self.was_killed = True

    def close(self) -> None:
        self.was_closed = True


def supervisor(fails: list[bool]) -> tuple[Supervisor, list[float]]:
    """One whose workers do not come up where fails says so, and the pauses that it makes."""
    pauses = list[float]()

    def open_link() -> Any:
        if fails and fails.pop(0):
            raise PredictorError("not today")
        return Opened()

    made = Supervisor(open_link)
    is_closed = made._closed.is_set

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return is_closed()

    made._closed.wait = wait  # type: ignore[method-assign,assignment]
    return made, pauses


def test_pauses_grow_while_workers_fail_and_start_over_after_one_that_has_lived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper, pauses = supervisor([False] + [True] * 7)
    first: Any = keeper.open()
    second: Any = keeper.reopen(first)
    assert first.was_killed
    assert not second.was_killed
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    # One that dies at once is a failure too.
    third: Any = keeper.reopen(second)
    assert pauses[8:] == [60]
    now = time.monotonic()
    monkeypatch.setattr("predictor_store.service.supervisor.time.monotonic", lambda: now + 100)
    keeper.reopen(third)
    assert pauses[9:] == [1]


def test_once_closed_no_worker_is_kept() -> None:
    keeper, _ = supervisor([])
    first: Any = keeper.open()
    keeper.close()
    assert keeper.reopen(first) is None
    assert first.was_killed


def test_a_shared_worker_that_is_killed_comes_back(tmp_path: Path) -> None:
    shared = SharedWorker(SageConfig(StoreConfig(str(tmp_path)), PredictorConfig()))
    shared.start()
    first = connect_worker(shared.config, "")
    os.kill(first.first["ready"]["process"], signal.SIGKILL)
    again = _connected(shared.config)
    assert again.first["ready"]["process"] != first.first["ready"]["process"]
    shared._supervisor.close()
    os.kill(again.first["ready"]["process"], signal.SIGKILL)
    for link in (first, again):
        link.close()


def _connected(config: SageConfig) -> Link:
    while True:
        try:
            return connect_worker(config, "")
        except PredictorError:
            time.sleep(0.1)
