"""A replica's death, as its controller and the HTTP process see it, without a server."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import sock_recv

from patches.http import replica_watch
from patches.http.dispatch import Dispatch, bury
from sage_sched.app.config import SageConfig
from tests.patches.replica_process import replica

SPAWN = multiprocessing.get_context("spawn")
# Longer than any host takes for a message.
PATIENCE_MS = 600_000


class Controller:
    """As much of one as is watched: two replicas of two processes each."""

    def __init__(self, folder: Path) -> None:
        self.context: Any = zmq.Context()
        self.port_args = SimpleNamespace(tokenizer_ipc_name=f"ipc://{folder}/tokenizer")
        self.http = self.context.socket(zmq.PULL)
        self.http.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self.http.bind(self.port_args.tokenizer_ipc_name)
        self.workers = [self.context.socket(zmq.PUSH) for _ in range(2)]
        self.scheduler_procs = []
        for rank, worker in enumerate(self.workers):
            worker.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
            worker.bind(f"ipc://{folder}/{rank}")
            for tp_rank in range(2):
                ready = SPAWN.Event()
                title = f"sglang::scheduler_DP{rank}_TP{tp_rank}"
                # The first of them is the one that is sent to.
                end = f"ipc://{folder}/{rank}" if not tp_rank else f"ipc://{folder}/nobody"
                process = SPAWN.Process(target=replica, args=(title, end, ready), daemon=True)
                process.start()
                assert ready.wait(PATIENCE_MS / 1e3)
                self.scheduler_procs.append(process)
        self.status = [True, True]
        self.active = [0, 1]

    def _refresh_active_workers(self) -> None:
        self.active = [rank for rank in range(2) if self.status[rank]]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    for process in made.scheduler_procs:
        process.kill()
    made.http.close(0)
    for worker in made.workers:
        worker.close(0)


def test_the_controller_tells_of_a_death_and_is_never_stuck_on_the_dead(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(replica_watch.os, "_exit", lambda status: ended.set())
    replica_watch._after_init_dispatcher(None, controller)  # type: ignore[arg-type]
    victim = controller.scheduler_procs[3]  # of the second replica, not the one that is sent to
    os.kill(victim.pid or 0, signal.SIGKILL)
    assert sock_recv(controller.http).status == [True, False]
    assert controller.active == [0]
    controller.scheduler_procs[2].join(PATIENCE_MS / 1e3)  # a half replica serves nobody
    assert not controller.scheduler_procs[2].is_alive()
    for _ in range(3):
        controller.workers[1].send(b"into the void")
        controller.workers[0].send(b"served")
    assert controller.scheduler_procs[0].is_alive()
    # Nothing is left to serve: the server ends.
    controller.scheduler_procs[0].kill()
    assert ended.wait(PATIENCE_MS / 1e3)


class Manager:
    """As much of a TokenizerManager as is told."""

    def __init__(self) -> None:
        loads = [SimpleNamespace(max_total_num_tokens=8192, max_running_requests=16)] * 2
        config = SageConfig.parse({"router": {"dispatch": "predicted-cost"}})
        dispatch = Dispatch(2, config, SimpleNamespace(read_all=lambda: loads))
        self.sage = SimpleNamespace(dispatch=dispatch, settings=None)
        self.state_communicator: Any = FanOutCommunicator(lambda asked: None, 2, "watching")
        self.aborted: list[Any] = []

    def _handle_abort_req(self, request: Any) -> None:
        self.aborted.append(request)


def test_who_waits_for_the_dead_hears_of_it_and_nobody_else() -> None:
    manager = Manager()
    for rid, rank in (("a", 0), ("b", 1), ("c", 1)):
        asked = SimpleNamespace(
            rid=rid,
            input_ids=[1, 2, 3],
            sampling_params=SimpleNamespace(max_new_tokens=10, custom_params=None),
            lora_id=None,
            extra_key=None,
            cache_salt=None,
        )
        assert manager.sage.dispatch.send(asked, rank, "abc")
    bury(manager, SimpleNamespace(status=[True, False]))  # type: ignore[arg-type]
    assert [request.rid for request in manager.aborted] == ["b", "c"]
    reason = manager.aborted[0].finished_reason
    assert reason["status_code"] is HTTPStatus.SERVICE_UNAVAILABLE
    assert "Replica 1 " in reason["message"]
    bury(manager, SimpleNamespace(status=[True, False]))  # type: ignore[arg-type]
    assert len(manager.aborted) == 2


async def _answered(asking: asyncio.Future[Any]) -> Any:
    """What there is once all that can go on has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)
    return asking.result()


async def _asked(communicator: Any) -> Any:
    asking = asyncio.ensure_future(communicator("how are you"))
    await asyncio.sleep(0)
    communicator.handle_recv("fine")
    return asking


def test_what_all_were_asked_is_answered_by_those_that_are_left() -> None:
    async def run() -> list[Any]:
        manager = Manager()
        asking = await _asked(manager.state_communicator)
        assert not asking.done()
        bury(manager, SimpleNamespace(status=[False, True]))  # type: ignore[arg-type]
        return [
            await _answered(asking), await _answered(await _asked(manager.state_communicator)),
        ]  # fmt: skip

    assert asyncio.run(run()) == [["fine"], ["fine"]]
