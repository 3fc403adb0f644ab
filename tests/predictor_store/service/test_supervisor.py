from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from predictor_store.service.endpoint import PredictorError
from predictor_store.service.link import connect_worker
from predictor_store.service.own_process import private_path
from predictor_store.service.supervisor import SharedWorker, Supervisor
from sage_sched.app.config import PredictorConfig, SageConfig, StoreConfig


def supervised(told: list[str], *fails: bool) -> Supervisor[Any]:
    """Return a supervisor whose workers die at once, and do not come up if `fails` says so."""
    left = [*fails]

    def opened() -> Any:
        if left and left.pop(0):
            raise PredictorError("not today")
        tells = {name: partial(told.append, name) for name in ("kill", "close")}
        return SimpleNamespace(wait=lambda: None, **tells)

    return Supervisor(opened, lambda worker: told.append("attach"), partial(told.append, "lose"))


@pytest.mark.parametrize(
    ("fails", "lived_s", "pauses"),
    [
        ([False] + [True] * 7, 0.0, [1, 2, 4, 8, 16, 32, 60, 60, 60]),
        ([False, True, True], 100.0, [1, 2, 4, 1, 1]),
    ],
)
def test_pauses_grow_until_a_worker_has_lived(
    fails: list[bool], lived_s: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(0, lived_s)
    monkeypatch.setattr("predictor_store.service.supervisor.time.monotonic", times.__next__)
    num_opened = 1 + len(pauses) - sum(fails)
    told, paused_s = list[str](), list[float]()
    supervisor = supervised(told, *fails)

    def wait(seconds: float) -> bool:
        if paused_s == pauses:
            supervisor.close()
            return True
        paused_s.append(seconds)
        return False

    monkeypatch.setattr(supervisor._closed, "wait", wait)
    supervisor._keep(supervisor._open())
    assert paused_s == pauses
    assert told == ["attach", "lose", "kill"] * num_opened + ["close"]


def test_once_closed_no_worker_is_kept() -> None:
    told = list[str]()
    supervisor = supervised(told)
    supervisor._open()
    supervisor.close()
    supervisor._open()  # a worker that was being opened meanwhile
    assert told == ["attach", "close", "close"]


def test_a_shared_worker_that_is_killed_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker that takes longer to end is killed, and leaves its folder.
    monkeypatch.setattr("predictor_store.service.own_process._CLOSE_TIMEOUT_SECONDS", 600.0)
    config = SageConfig(StoreConfig(str(tmp_path), 50), PredictorConfig(threshold=0.5))
    shared = SharedWorker(config)
    shared.start()
    first = connect_worker(shared.config, "")
    killed = first.first.stats.process
    assert SageConfig.parse(json.loads(psutil.Process(killed).cmdline()[-1])) == shared.config
    os.kill(killed, signal.SIGKILL)
    while psutil.pid_exists(killed):
        time.sleep(0.01)
    again = None
    while again is None:
        with contextlib.suppress(PredictorError):
            again = connect_worker(shared.config, "")
        time.sleep(0.1)
    assert again.first.stats.process != killed
    for link in (first, again):
        link.close()
    shared.close()
    assert not psutil.pid_exists(again.first.stats.process)
    assert not Path(shared.config.predictor.service).parent.exists()


@pytest.mark.parametrize("num_chars", [20, 60, 71, 72, 92, 200])
def test_sockets_fit_into_any_folder(num_chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="x") as made:
        folder = Path(made, "x" * max(1, num_chars - len(made) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        path = Path(private_path())
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert (path.parent.parent == folder) == (num_chars < 71)
        path.unlink()
        path.parent.rmdir()


def test_leftovers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = {name: tmp_path / f"sage-sched-{name}" for name in ("old", "new", "alive", "other")}
    with contextlib.ExitStack() as alive:
        for name, folder in places.items():
            folder.mkdir()
            path = folder / "predictor.socket"
            if name == "other":
                path.write_text("a file of a person")
            else:
                bound = socket.socket(socket.AF_UNIX)
                bound.bind(str(path))
                if name == "alive":
                    alive.enter_context(bound).listen()
                else:
                    bound.close()
            if name != "new":
                os.utime(path, (0, 0))
        ours = Path(private_path()).parent
    assert {*tmp_path.iterdir()} == {*places.values(), ours} - {places["old"]}
