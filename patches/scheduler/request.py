"""Defines a scheduler's state for one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from patches.engine_types import Batch
from patches.listener import Listener
from sage_sched.job import Job
from sage_sched.slo import Deadlines


@dataclass(slots=True)
class Waits:
    """The waits of a request, by this rank's clock. Traces and SGLang's timeouts use them; plans do
    not.

    came_s: its arrival.
    since_s: when its current wait began; None while it runs.
    waited_s: all earlier waits.
    num_before: requests ahead of it when it was first put in order; None until then.
    retracted_s: when it was last retracted.
    """

    came_s: float
    since_s: float | None = None
    waited_s: float = 0.0
    num_before: int | None = None
    retracted_s: float = 0.0

    def begins(self) -> None:
        """Begin a wait: the request was preempted."""
        self.since_s = time.monotonic()

    def ends(self) -> None:
        """End the wait: the request runs."""
        self.waited_s, self.since_s = self.so_far_s(), None

    def was_retracted(self, since_s: float) -> None:
        """Count the wait of a request that was retracted, and runs again now, perhaps chunk by
        chunk. If it was preempted, its wait is already counted (begins).

        since_s: when it was back in the queue, by SGLang's stamp (time.perf_counter).
        """
        if since_s <= self.retracted_s:
            return
        self.retracted_s = since_s
        if self.since_s is None:
            self.waited_s += max(0.0, time.perf_counter() - since_s)

    def ran_s(self) -> float:
        """Return for how long it has run until now."""
        return time.monotonic() - self.came_s - self.so_far_s()

    def so_far_s(self) -> float:
        """Return the sum of its waits until now."""
        if self.since_s is None:
            return self.waited_s
        return self.waited_s + time.monotonic() - self.since_s


class WaitListener(Listener):
    """Ends the wait of each request that runs. Place it after the listeners that report waits."""

    def ran(self, batch: Batch) -> None:
        if not batch.forward_mode.is_extend_without_speculative():
            return
        num_prefills = len(batch.reqs) - len(batch.decoding_reqs or [])
        for place, req in enumerate(batch.reqs):
            # A prefill of a request with tokens: it was retracted, or preempted without a copy of
            # its KV.
            if req.output_ids and place < num_prefills:
                req.sage.waits.was_retracted(req.time_stats.wait_queue_entry_time)
            req.sage.waits.ends()

    def stepped(self, batch: Batch, result: Any) -> None:
        if result is None:  # a decode server's request runs from here on
            for req in batch.reqs:
                req.sage.waits.ends()


@dataclass(slots=True)
class TokenTimes:
    """The arrival times of the tokens of a request with an SLO.

    came_s: its arrival.
    ttft_s, last_s: the time from its arrival to its first and its latest token.
    num_next_on_time: the tokens after the first that were on time.
    """

    deadlines: Deadlines
    came_s: float
    ttft_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    num_next_on_time: int = 0


class PredictedTimes(NamedTuple):
    """The predicted times of a request, from at_s on this rank's clock.

    others_waited: whether it could have been refused because of them.
    was_sampled: whether it was admitted although it was predicted to be late.
    """

    ttft_s: float
    ttlt_s: float
    at_s: float
    others_waited: bool = False
    was_sampled: bool = False


@dataclass(slots=True)
class RequestState:
    """Our state of one request, kept as `Req.sage`.

    token_times: None without an SLO.
    was_checked: whether it was ever chosen to be preempted.
    why_not_preemptible: the feature that rules preemption out, or None.
    refusal: why it was turned away, or ended before its answer did; "" if it was not.
    shared_nodes: the nodes of the radix tree with its KV when it left the device, and how many
        tokens end with each.
    """

    job: Job
    waits: Waits
    token_times: TokenTimes | None = None
    has_ended: bool = False
    was_checked: bool = False
    why_not_preemptible: str | None = None
    shared_nodes: dict[int, int] = field(default_factory=dict)
    predicted_times: PredictedTimes | None = None
    refusal: str = ""

    @property
    def is_preempted(self) -> bool:
        """Whether it was preempted and is not back yet."""
        return self.job.num_preemptions > 0 and self.waits.since_s is not None


def predicted(job: Job) -> dict[str, Any]:
    """Return the predicted length of its answer in tokens: median, 80 % quantile, and their
    source."""
    if not job.is_predicted:
        return {"p50_tokens": None, "p80_tokens": None, "source": "none"}
    lengths = job.distribution
    return {
        "p50_tokens": lengths.quantile(0.5),
        "p80_tokens": lengths.quantile(0.8),
        "source": lengths.source,
    }
