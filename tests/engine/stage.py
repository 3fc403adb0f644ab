"""An SGLang plugin for tests: the scheduler waits where a test tells it to.

A test so makes its situation (these have arrived, that one has said so much, two are swapped) and
acts in it, however fast the host is. Orders come as POST /set_internal_state, which SGLang
broadcasts: all ranks wait at the same pass. A waiting scheduler still takes in what arrives, aborts
and questions too; it starts no batch.

With SAGE_TEST_STEP_MS set no step takes less time than that: the host seems slower.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import requests

from bench.server import Server
from tests.engine.serving import wait_until

STEP_MS = "SAGE_TEST_STEP_MS"
_PREFIX = "stage_"
_POLL_S = 0.001


@contextmanager
def held(server: Server, **until: int) -> Iterator[Callable[[], None]]:
    """In the block the scheduler waits, or will as soon as all that `until` says is so:

    arrived: so many requests have come since the block began. tokens: some running request has said
    so many. swapped: so many that have said something wait in the queue.

    With no `until` it waits from the first pass on. Yields a function that returns when the
    scheduler waits. The end of the block lets it go on.
    """
    _order(server, hold=1, **until)
    try:
        yield lambda: wait_until(lambda: bool(_state(server)["waits"]))
    finally:
        _order(server, hold=0)


def has_arrived(server: Server, num_requests: int) -> None:
    """Return when so many have come since the last order."""
    wait_until(lambda: _state(server)["num_arrived"] >= num_requests)


def started(server: Server) -> list[str]:
    """The ids of the requests that came since the last block began, as their first batch ran."""
    found: list[str] = _state(server)["started"]
    return found


def _order(server: Server, **order: int) -> None:
    body = {"server_args": {_PREFIX + name: value for name, value in order.items()}}
    requests.post(f"{server.url}/set_internal_state", json=body, timeout=60).raise_for_status()


def _state(server: Server) -> dict[str, Any]:
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    state: dict[str, Any] = info["internal_states"][0]["stage"]
    return state


class Stage:
    """One scheduler's orders, and what it counts. Knows nothing that another rank does not."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._order: dict[str, int] = {}
        self._held = False
        self._waits = False
        self.num_arrived = 0
        self._started: dict[str, None] = {}

    def order(self, order: dict[str, int]) -> None:
        """Hold, from now on or as soon as the rest of the order is so; or go on."""
        self._held = bool(order.pop("hold"))
        self._order = order
        self._waits = False
        if self._held:
            self.num_arrived = 0
            self._started = {}

    def runs(self, batch: Any) -> None:
        """A batch is about to run."""
        for req in batch.reqs:
            self._started.setdefault(req.rid)

    def waits(self) -> bool:
        """Whether no batch may start now. Once it waits, it does until the next order."""
        self._waits = self._held and (self._waits or self._all_so())
        return self._waits

    def _all_so(self) -> bool:
        running = self._scheduler.running_batch.reqs
        waiting = self._scheduler.waiting_queue
        facts = {
            "arrived": self.num_arrived,
            "tokens": max((len(req.output_ids) for req in running), default=0),
            "swapped": sum(bool(req.output_ids) for req in waiting),
        }
        return all(facts[name] >= wanted for name, wanted in self._order.items())

    def state(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "waits": self._waits,
            "num_arrived": self.num_arrived,
            "started": list(self._started),
        }


def register() -> None:
    """The entry point."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler

    shortest_step_s = float(os.environ.get(STEP_MS) or 0.0) / 1e3

    def around(name: str, hook: Callable[..., Any]) -> None:
        # Not through SGLang's registry: it drops a hook whose target another plugin has hooked.
        original = getattr(Scheduler, name)

        @wraps(original)
        def hooked(self: Any, *args: Any, **kw: Any) -> Any:
            return hook(partial(original, self), self, *args, **kw)

        setattr(Scheduler, name, hooked)

    def init(original: Any, self: Any, *args: Any, **kw: Any) -> None:
        self.stage = Stage(self)
        original(*args, **kw)

    def ingest(original: Any, self: Any, *args: Any, **kw: Any) -> list[Any]:
        received: list[Any] = original(*args, **kw)
        while self.stage.waits():
            time.sleep(_POLL_S)
            received += original(*args, **kw)
        return received

    def handle_request(original: Any, self: Any, *args: Any, **kw: Any) -> None:
        original(*args, **kw)
        self.stage.num_arrived += 1

    def run_batch(original: Any, self: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        self.stage.runs(batch)
        ends = time.perf_counter() + shortest_step_s
        result = original(batch, *args, **kw)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return result

    def get_state(original: Any, self: Any, recv_req: Any) -> Any:
        result = original(recv_req)
        result.internal_state["stage"] = self.stage.state()
        return result

    def set_state(original: Any, self: Any, recv_req: Any) -> Any:
        told = recv_req.server_args
        order = {name.removeprefix(_PREFIX): told[name] for name in told if _PREFIX in name}
        if not order:
            return original(recv_req)
        self.stage.order(order)
        return SetInternalStateReqOutput(updated=True)

    around("__init__", init)
    around("ingest_requests", ingest)
    around("handle_generate_request", handle_request)
    around("run_batch", run_batch)
    around("get_internal_state", get_state)
    around("set_internal_state", set_state)
