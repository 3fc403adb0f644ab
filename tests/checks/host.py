"""Measures the host time that we add to a scheduler's step, and that a plan takes.

`python -m tests.checks.host` calls our hooks as SGLang calls them, on requests with predicted
lengths, and prints a table. Times are CPU times of this thread. A step is our part of all hooks of
a decode step. A plan is our part of a whole pass: the facts, the order, the remaining needs of
running requests, and preemptions. No server is needed. `--policy proserve-expected` gives all
requests deadlines.
"""

from __future__ import annotations

import argparse
import gc
import time
from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from patches.carrier import CLOCK
from patches.scheduler.executor import run_pass
from patches.scheduler.preemption import Preemption
from predictor_store.predict.predictor import MAX_ATOMS
from sage_sched.app.config import PreemptionConfig
from sage_sched.app.registry import policy_type
from sage_sched.headroom import Headroom
from sage_sched.job import NO_HINTS, Hints
from sage_sched.waiting_queue import place_of
from tests.patches.schedulers import MOST_RUNNING, Server, make_request

_QUEUE_LENGTHS = (0, 10, 100, 1_000, 10_000)
_NUM_STEPS = 150
# The times are scaled to a host that takes this long for _reference, because a busy one is slower.
_REFERENCE_S = 250e-6
# A step of an H200 and a model of 8B parameters.
_STEP_S = 0.006
# Seconds after an arrival at which `sage` starts it, or it can no longer be in time.
_DUE_S, _LATE_S = 1.0, 60.0
_PROMISED = Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0)
_NO_HOST_MEMORY = PreemptionConfig(host_pool_gib=1e-9)


class FullServer(Server):
    """A server with a full batch of the best requests by the policy, and others waiting.

    Free memory is set aside for the running requests. A chosen request cannot be preempted, because
    host memory has no room: the time of a move must not be part of a decision.
    """

    def __init__(
        self,
        num_waiting: int,
        num_newcomers: int,
        policy: str = "sage",
        hints: Hints = NO_HINTS,
        *,
        num_running: int = MOST_RUNNING,
    ) -> None:
        super().__init__({"store": {"on_disk": False}}, schedule_policy=policy)
        generator = np.random.default_rng(num_waiting)
        num_requests = num_running + num_waiting + num_newcomers
        requests = self.arrive(*(any_request(generator, hints) for _ in range(num_requests)))
        self.state.ticked(0.0, CLOCK)  # sets their times
        self.state.preemption = Preemption(self.scheduler, _NO_HOST_MEMORY)
        for request in requests:
            request.sage.was_checked = True  # it uses only features that a swap keeps
        self.batch = self.scheduler.running_batch
        self.set_free(0)
        view = self.state.view(self.batch)
        requests.sort(key=lambda req: place_of(req.sage.job, self.state.core.policy, view))
        self.batch.reqs, waiting = requests[:num_running], requests[num_running:]
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

    def next_arrival(self) -> None:
        """Move the first of the queue elsewhere, and add an arrival."""
        del self.scheduler.waiting_queue[0]
        self.scheduler.waiting_queue.append(self.newcomers.pop())
        self.state.core.num_arrivals += 1

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


class Steps:
    """Takes decode steps of a full server, and measures our part in CPU seconds of this thread."""

    def __init__(self, server: FullServer, now_s: float) -> None:
        """now_s: seconds since all requests came."""
        self._server, self._now_s = server, now_s
        mode = {"is_idle": lambda: False, "is_prebuilt": lambda: False}
        vars(server.batch.forward_mode).update(mode)
        vars(server.scheduler).update(_sched_idled=False)

    def step_s(self) -> tuple[float, float]:
        """Take a step. Return the time of its pass, and of all hooks."""
        server, batch = self._server, self._server.batch
        hooks, scheduler = server.hooks, server.scheduler
        self._now_s += _STEP_S
        for request in batch.reqs:
            request.output_ids.append(0)
        result = SimpleNamespace(accept_lens=None)
        began_s = time.thread_time()
        hooks["_poll_timeout_aborts"](lambda *given: [], scheduler)
        server.state.ticked(self._now_s, CLOCK)
        pass_s = _timed_s(server.take_pass)
        hooks["run_batch"](lambda *given: result, scheduler, batch)
        hooks["process_batch_result"](None, scheduler, batch, result)
        return pass_s, time.thread_time() - began_s


def _timed_s(action: Callable[[], object]) -> float:
    began_s = time.thread_time()
    action()
    return time.thread_time() - began_s


def _reference() -> None:
    total = 0
    for number in range(5000):
        total += number % 7


class Times:
    """Times of one action, in milliseconds of a quiet host."""

    def __init__(self) -> None:
        self._real_s: list[float] = []
        self._reference_s: list[float] = []

    def add(self, seconds: float) -> None:
        self._real_s.append(seconds)
        self._reference_s.append(_timed_s(_reference))

    def __str__(self) -> str:
        """Return the median and the mean."""
        if not self._real_s:
            return f"{'-':>16}"
        ms = 1e3 * np.array(self._real_s) * _REFERENCE_S / np.median(self._reference_s)
        return f"{np.median(ms):8.3f}{ms.mean():8.3f}"


def measure(num_waiting: int, num_running: int, policy: str) -> list[Times]:
    """Return the times of a step that changes nothing, of a plan after one request has come and
    another has left, of a plan that starts requests, and of an arrival."""
    hints = _PROMISED if policy_type(policy).traits.has_deadlines else NO_HINTS

    def server() -> FullServer:
        return FullServer(num_waiting, _NUM_STEPS, policy, hints, num_running=num_running)

    full = server()
    late, due = Steps(full, _LATE_S), Steps(server(), _DUE_S)
    step, plan, start, arrival = (Times() for _ in range(4))
    gc.disable()  # a collection visits everything in this process
    for _ in range(_NUM_STEPS if num_waiting else 0):
        full.next_arrival()
        plan.add(late.step_s()[0])
        start.add(due.step_s()[0])
    for _ in range(_NUM_STEPS):
        step.add(late.step_s()[1])
    generator = np.random.default_rng(num_waiting)
    for _ in range(_NUM_STEPS):
        request = any_request(generator)
        arrival.add(_timed_s(partial(full.state.listeners.arrived, request)))
    gc.enable()
    return [step, plan, start, arrival]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="sage", help="default: %(default)s")
    parser.add_argument(
        "--running", type=int, default=64, help="requests in the batch (default: %(default)s)"
    )
    args = parser.parse_args()
    print(f"ms, median and mean, {args.running} running")
    print("waiting           step           a plan       starts due          arrival")
    for num_waiting in _QUEUE_LENGTHS:
        print(f"{num_waiting:7,d}", *measure(num_waiting, args.running, args.policy))


if __name__ == "__main__":
    main()
