"""Measures how long a scheduler takes to register a request, and to plan a whole pass.

`python -m tests.checks.queue_pass` times patches/scheduler/state.py, the code that the scheduler
runs, on requests with predicted lengths, and prints a table. A pass covers the view, the order, the
remaining needs of running requests, and preemptions. No server is needed. `--policy
proserve-expected` gives all requests deadlines.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from patches.scheduler.executor import run_pass
from patches.scheduler.preemption import Preemption
from predictor_store.predict.predictor import MAX_ATOMS
from sage_sched.app.config import PreemptionConfig
from sage_sched.app.registry import policy_type
from sage_sched.headroom import Headroom
from sage_sched.job import NO_HINTS, Hints
from sage_sched.waiting_queue import place_of
from tests.patches.schedulers import MOST_RUNNING, Server, make_request

QUEUE_LENGTHS = (100, 1_000, 10_000)
_NUM_PASSES = 50
_PROMISED = Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0)
_NO_HOST_MEMORY = PreemptionConfig(host_pool_gib=1e-9)


class FullServer(Server):
    """A server whose slots hold the best requests by the policy, with others waiting.

    Free memory is set aside for the running requests. A chosen request cannot be preempted, because
    host memory has no room: the time of a move must not be part of a decision.
    """

    def __init__(
        self, num_waiting: int, num_newcomers: int, policy: str = "sage", hints: Hints = NO_HINTS
    ) -> None:
        super().__init__(schedule_policy=policy)
        generator = np.random.default_rng(num_waiting)
        num_requests = MOST_RUNNING + num_waiting + num_newcomers
        requests = self.arrive(*(any_request(generator, hints) for _ in range(num_requests)))
        self.state.preemption = Preemption(self.scheduler, _NO_HOST_MEMORY)
        for request in requests:
            request.sage.was_checked = True  # it uses only features that survive a swap
        self.batch = self.scheduler.running_batch
        self.set_free(0)
        view = self.state.view(self.batch)
        requests.sort(key=lambda req: place_of(req.sage.job, self.state.policy, view))
        self.batch.reqs, waiting = requests[:MOST_RUNNING], requests[MOST_RUNNING:]
        self.batch.batch_is_full = True
        self.newcomers = [
            waiting.pop(int(generator.integers(len(waiting)))) for _ in range(num_newcomers)
        ]
        self.scheduler.waiting_queue = waiting
        for request in self.batch.reqs:
            request.output_ids = array("q", [0]) * int(generator.integers(1, 500))
        running = self.state.jobs.running(self.batch.reqs)
        self.set_free(sum(Headroom.of(self.state.view(self.batch)).set_aside_tokens(running)))

    @property
    def waiting(self) -> list[Any]:
        """The queue."""
        queue: list[Any] = self.scheduler.waiting_queue
        return queue

    def set_free(self, num_tokens: int) -> None:
        """Leave this number of tokens of the KV pool free."""
        self.scheduler.token_to_kv_pool_allocator.available_size = lambda: num_tokens

    def next_step(self) -> None:
        """Give all running requests a token, move the first of the queue elsewhere, and add an
        arrival."""
        for request in self.batch.reqs:
            request.output_ids.append(0)
        del self.scheduler.waiting_queue[0]
        self.scheduler.waiting_queue.append(self.newcomers.pop())
        self.state.jobs.num_arrivals += 1

    def take_pass(self, original: Any = None) -> list[Any]:
        """Run our part of a pass and return the queue after it. original: SGLang's part, called
        with the running batch."""

        def call(batch: Any) -> Any:
            if original is not None:
                original(batch)
            return SimpleNamespace(running_batch=batch)

        run_pass(self.scheduler, call, self.batch)
        return self.waiting


def any_request(generator: np.random.Generator, hints: Hints = NO_HINTS) -> Any:
    """Make a request with a random prompt and prediction."""
    lengths = generator.lognormal(5.5, 1.0, MAX_ATOMS).astype(np.int64) + 1
    num_tokens = int(generator.integers(10, 2000))
    prompt = generator.integers(0, 1 << 17, num_tokens).tolist()
    req = make_request(lengths, prompt, hints=hints, max_new_tokens=4096)
    req.kv.kv_allocated_len = 500
    return req


def _timed_ms(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return (time.perf_counter() - started_s) * 1e3


def measure(num_waiting: int, policy: str = "sage") -> tuple[list[float], list[float]]:
    """Return milliseconds of each arrival, and of each pass with one new request since the last."""
    hints = _PROMISED if policy_type(policy).uses_clock else NO_HINTS
    server = FullServer(num_waiting, _NUM_PASSES, policy, hints)
    passes_ms = []
    for number in range(_NUM_PASSES):
        server.next_step()
        server.state.jobs.ticked(0.05 * number)
        passes_ms.append(_timed_ms(server.take_pass))
    generator = np.random.default_rng(num_waiting)
    requests: list[Any] = [any_request(generator) for _ in range(_NUM_PASSES)]
    return [_timed_ms(partial(server.state.listeners.arrived, req)) for req in requests], passes_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="sage", help="default: %(default)s")
    policy = parser.parse_args().policy
    print(f"ms, median and p99       arrival    a whole pass, {MOST_RUNNING} running")
    for num_waiting in QUEUE_LENGTHS:
        columns = measure(num_waiting, policy)
        cells = (f"{np.median(ms):8.3f} {np.quantile(ms, 0.99):8.3f}" for ms in columns)
        print(f"{num_waiting:7,d} waiting", *cells)


if __name__ == "__main__":
    main()
