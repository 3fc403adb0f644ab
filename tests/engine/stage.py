"""An SGLang plugin for tests: it holds the scheduler at a chosen point.

So a test builds a situation (these requests have arrived, that one has ten tokens, two are swapped
out) and acts in it, on a host of any speed. Orders come as POST /set_internal_state, which SGLang
broadcasts, so all ranks wait at the same pass. A held scheduler still receives requests, aborts and
questions; it starts no batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import requests

from bench.engines.server.server import Server
from tests.engine.hooks import around
from tests.engine.serving import post, states, wait_until

# For servers that ask for one.
ADMIN_KEY = "the admin's"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
_PREFIX = "stage_"
_POLL_S = 0.001
_Answer = TypeVar("_Answer")


def hold(server: Server, **until: int) -> None:
    """Hold the scheduler from now on, or as soon as all conditions of `until` hold.

    tokens: some running request has this many. swapped: this many requests with tokens are in the
    queue. prefilled: this many tokens of the chunked prompt are done. Returns at once. The counts
    of arrivals, aborts and starts begin anew.
    """
    _order(server, hold=1, **until)


@contextmanager
def sabotaged(server: Server, order: int) -> Iterator[None]:
    """Give the saboteur (saboteur.py) an order for a block, then flush the radix cache."""
    _order(server, sabotage=order)
    try:
        yield
    finally:
        _order(server, sabotage=0)
        url = f"{server.url}/flush_cache"
        wait_until(lambda: requests.post(url, headers=AS_ADMIN, timeout=300).ok)


@contextmanager
def held(server: Server, **until: int) -> Iterator[None]:
    """hold() for a block."""
    hold(server, **until)
    try:
        yield
    finally:
        with suppress(requests.ConnectionError):  # a test may have killed it
            _order(server, hold=0)


def once_held(server: Server) -> dict[str, Any]:
    """Return the state when the scheduler waits."""
    wait_until(lambda: bool(state(server)["waits"]))
    return state(server)


def once(server: Server, **least: int) -> None:
    """Return when num_arrived or num_aborts since the scheduler was held is this high."""
    wait_until(lambda: all(state(server)[name] >= number for name, number in least.items()))


def state(server: Server) -> dict[str, Any]:
    """Stage.state() of the replica that has received the most requests."""
    found: list[dict[str, Any]] = [state["stage"] for state in states(server)]
    return max(found, key=lambda state: state["num_arrived"])


def together(
    server: Server,
    calls: Sequence[Callable[[], _Answer]],
    then: Callable[[dict[str, Any]], None] | None = None,
    **until: int,
) -> list[_Answer]:
    """Make calls one after the other, each of which sends a request, and return their results. All
    requests arrive before the first may start. `then` is called with once_held()'s answer when the
    scheduler waits again, see hold()."""
    with ThreadPoolExecutor(len(calls)) as pool:
        with held(server):
            answers = []
            for call in calls:
                answers.append(pool.submit(call))
                once(server, num_arrived=len(answers))
            if then is not None:
                hold(server, **until)
                then(once_held(server))
        return [answer.result() for answer in answers]


def _order(server: Server, **order: int) -> None:
    args = {_PREFIX + name: value for name, value in order.items()}
    post(server, "/set_internal_state", {"server_args": args}, AS_ADMIN)


class Stage:
    """One scheduler's orders and counters, which are the same on all ranks."""

    sabotage = 0

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._held = False
        self._until: dict[str, int] = {}
        self._waits = False
        self.num_arrived = 0
        self.num_aborts = 0
        self._started: dict[str, None] = {}

    def obey(self, order: dict[str, int]) -> None:
        self._held = bool(order.pop("hold"))
        self._until = order
        self._waits = False
        if self._held:
            self.num_arrived = self.num_aborts = 0
            self._started = {}

    def runs(self, batch: Any) -> None:
        """Note a batch that is about to run."""
        for req in batch.reqs:
            if req is not self._scheduler.chunked_req:
                self._started.setdefault(req.rid)

    def waits(self) -> bool:
        """Whether no batch may start now. A scheduler that waits does so until the next order."""
        self._waits = self._held and (self._waits or self._all_so())
        return self._waits

    def _all_so(self) -> bool:
        chunked = self._scheduler.chunked_req
        facts = {
            "tokens": max((len(req.output_ids) for req in self._running()), default=0),
            "swapped": len(self._swapped()),
            "prefilled": 0 if chunked is None else chunked.extend_end,
        }
        return all(facts[name] >= wanted for name, wanted in self._until.items())

    def state(self) -> dict[str, Any]:
        """Return counters and the ids of requests since the scheduler was held. started: requests
        in the order of their first tokens. fresh: requests that wait for their start."""
        waiting = self._scheduler.waiting_queue
        return {
            "waits": self._waits,
            "num_arrived": self.num_arrived,
            "num_aborts": self.num_aborts,
            "started": list(self._started),
            "running": [req.rid for req in self._running()],
            "swapped": [req.rid for req in self._swapped()],
            "fresh": [req.rid for req in waiting if not req.output_ids],
        }

    def _running(self) -> list[Any]:
        # A prefill's requests join the running batch a pass later. A preempted request has left it.
        last = self._scheduler.last_batch
        found = [*self._scheduler.running_batch.reqs, *(last.reqs if last is not None else ())]
        waiting = self._scheduler.waiting_queue
        return [req for req in dict.fromkeys(found) if not req.finished() and req not in waiting]

    def _swapped(self) -> list[Any]:
        return [req for req in self._scheduler.waiting_queue if req.output_ids]


def register() -> None:
    """The entry point."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler

    def init(original: Any, self: Any, *args: Any, **kw: Any) -> None:
        self.stage = Stage(self)
        original(*args, **kw)

    def ingest(original: Any, self: Any, *args: Any, **kw: Any) -> list[Any]:
        received: list[Any] = original(*args, **kw)
        while self.stage.waits():
            time.sleep(_POLL_S)
            received += original(*args, **kw)
        return received

    def count(name: str, counter: str) -> None:
        def counted(original: Any, self: Any, *args: Any, **kw: Any) -> Any:
            setattr(self.stage, counter, getattr(self.stage, counter) + 1)
            return original(*args, **kw)

        around(Scheduler, name, counted)

    def run_batch(original: Any, self: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        self.stage.runs(batch)
        return original(batch, *args, **kw)

    def add_state(original: Any, self: Any, recv_req: Any) -> Any:
        result = original(recv_req)
        result.internal_state["stage"] = self.stage.state()
        return result

    def obey(original: Any, self: Any, recv_req: Any) -> Any:
        told = recv_req.server_args
        order = {name.removeprefix(_PREFIX): told[name] for name in told if _PREFIX in name}
        if not order:
            return original(recv_req)
        if "sabotage" in order:
            Stage.sabotage = order["sabotage"]
        else:
            self.stage.obey(order)
        return SetInternalStateReqOutput(updated=True)

    around(Scheduler, "__init__", init)
    around(Scheduler, "ingest_requests", ingest)
    count("handle_generate_request", "num_arrived")
    count("abort_request", "num_aborts")
    around(Scheduler, "run_batch", run_batch)
    around(Scheduler, "get_internal_state", add_state)
    around(Scheduler, "set_internal_state", obey)
