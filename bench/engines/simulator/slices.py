"""A prefill that is cut between layers, and who passes it: QLLM's idea. SGLang is not cut so."""

from __future__ import annotations

from collections.abc import Sequence

from bench.engines.simulator.prefill_adder import Part, PrefillAdder
from bench.engines.simulator.state import EngineState
from sage_sched.best_effort import Qllm, those_who_pass
from sage_sched.plan import UNLIMITED


def is_cut(state: EngineState, parts: Sequence[Part]) -> bool:
    """Whether a prefill gives way to others."""
    policy = state.policy
    if state.engine.slices == 1 or not isinstance(policy, Qllm) or state.parked:
        return False
    is_whole = state.chunked is None and all(part.completes for part in parts)
    return is_whole and policy.gives_way(part.progress.job for part in parts)


def passing(state: EngineState) -> list[Part]:
    """The prefill of those who pass the parked one, as far as there are memory and slots."""
    policy = state.policy
    assert isinstance(policy, Qllm)
    if not any(policy.passes(progress.job) for progress in state.queue):
        return []
    parked = [progress.job for progress in state.parked]
    visible = [state.queue[place] for place in those_who_pass(parked, policy, state.view())]
    was_full, state.batch_is_full = state.batch_is_full, False
    parts = PrefillAdder(state, UNLIMITED).run(visible).parts
    state.batch_is_full = was_full
    return parts


def decodes(state: EngineState) -> bool:
    """Whether those that decode get a token at a cut: if one of them would pass, and no memory has
    to be given back for it."""
    policy = state.policy
    assert isinstance(policy, Qllm)
    is_urgent = any(policy.passes(progress.job) for progress in state.decode)
    return is_urgent and state.decode.pages_needed(1) <= state.pool.room_pages
