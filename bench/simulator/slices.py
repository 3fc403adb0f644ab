"""Cuts a prefill between layers to let other requests pass (QLLM). SGLang cannot do that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from bench.simulator.prefill_adder import Part, PrefillAdder
from bench.simulator.state import EngineState
from sage_sched.best_effort import Qllm
from sage_sched.job import Job
from sage_sched.plan import UNLIMITED
from sage_sched.scheduler import Scheduler
from sage_sched.view import SchedulerView


def is_cut(state: EngineState, parts: Sequence[Part]) -> bool:
    """Whether a prefill is cut to let others pass."""
    policy = state.policy
    if state.engine.slices == 1 or not isinstance(policy, Qllm) or state.parked:
        return False
    is_whole = state.chunked is None and all(part.completes for part in parts)
    return is_whole and gives_way(policy, (part.progress.job for part in parts))


def gives_way(policy: Qllm, jobs: Iterable[Job]) -> bool:
    """Whether a prefill of these jobs lets latency-sensitive jobs pass: all are best effort, and
    none is at its starvation bound."""
    return all(not job.goes_first and not policy.passes(job) for job in jobs)


def passing_positions(parked: Sequence[Job], core: Scheduler, view: SchedulerView) -> list[int]:
    """Return the positions of the waiting jobs that enter while a prefill is parked, in order.

    They are latency-sensitive jobs that go before all best-effort jobs, the parked ones included.
    So the bound of Qllm holds for each. A job with KV in host memory waits, and so do the jobs
    behind it: its return may need a preemption, which is decided between two passes.
    """
    policy = core.policy
    assert isinstance(policy, Qllm)
    ahead = policy.ahead(view, core.queue, parked)
    return [*takewhile(lambda position: view.waiting[position] not in view.swapped, ahead)]


def passing(state: EngineState) -> list[Part]:
    """Return the prefill of jobs that pass the parked one, if there are memory and slots."""
    policy = state.policy
    assert isinstance(policy, Qllm)
    if not any(policy.passes(progress.job) for progress in state.queue):
        return []
    parked = [progress.job for progress in state.parked]
    visible = [state.queue[place] for place in passing_positions(parked, state.core, state.view())]
    was_full, state.is_full = state.is_full, False
    parts = PrefillAdder(state, UNLIMITED).run(visible).parts
    state.is_full = was_full
    return parts


def decodes(state: EngineState) -> bool:
    """Return whether decoding requests get a token at a cut: if one of them would pass, and no
    memory has to be freed for it."""
    policy = state.policy
    assert isinstance(policy, Qllm)
    is_urgent = any(policy.passes(progress.job) for progress in state.decode)
    return is_urgent and state.decode.pages_needed(1) <= state.pool.room_pages
