"""A prefill that gives way between two layers: how it is cut, and who passes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from sage_sched.best_effort.policy import Qllm
from sage_sched.job import Job
from sage_sched.steps import StepTime, attended_pairs
from sage_sched.view import SchedulerView


def layers_per_slice(
    step_time: StepTime, cached: Sequence[int], new: Sequence[int], num_layers: int, slice_s: float
) -> int:
    """How many layers of a prefill take slice_s at most, at least one, at most all.

    cached, new: of each of its prompts, tokens that are there and that it computes. By step times
    that all ranks were told, never by a clock: ranks that cut at different layers would hang.
    """
    pairs = sum(attended_pairs(before, more) for before, more in zip(cached, new, strict=True))
    layer_s = step_time.prefill_s(len(new), sum(new), pairs) / num_layers
    if layer_s * num_layers <= slice_s:
        return num_layers
    return max(1, int(slice_s / layer_s))


def those_who_pass(parked: Sequence[Job], policy: Qllm, view: SchedulerView) -> list[int]:
    """The positions of the waiting jobs that get in while a prefill is parked between two layers,
    in their order.

    They are the latency-sensitive ones that go before all of best effort, the parked too, so that
    the bound of Qllm holds for each. One with KV in host memory waits, and those behind it: where
    it comes back, others may have to yield, which is decided between two passes.
    """
    ahead = policy.ahead(view, parked)
    return [*takewhile(lambda position: view.waiting[position] not in view.swapped, ahead)]
