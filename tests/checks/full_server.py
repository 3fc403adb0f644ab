"""A server with full slots, for queue_pass.py and tests."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np

from patches.scheduler.executor import run_pass
from patches.scheduler.preemption import Preemption
from predictor_store.predict.predictor import MAX_ATOMS
from sage_sched.app.config import PreemptionConfig
from sage_sched.headroom import Headroom
from sage_sched.job import NO_HINTS, Hints
from sage_sched.waiting_queue import place_of
from tests.patches.schedulers import MOST_RUNNING, Server, make_request

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
