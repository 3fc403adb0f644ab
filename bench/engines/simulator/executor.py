"""One scheduling pass: a plan is carried out around SGLang's own admission.

It goes step by step as patches/scheduler/executor.py does on SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, takewhile

from bench.engines.simulator.batch import PassResult
from bench.engines.simulator.prefill_adder import PrefillAdder
from bench.engines.simulator.request import Progress
from bench.engines.simulator.state import EngineState
from bench.engines.simulator.stock import StockPolicy, stock_order
from sage_sched.decide import decide
from sage_sched.plan import UNLIMITED, Budget, Plan, Yield

# SGLang's WAITING_PREFIX_REFRESH_INTERVAL and WAITING_QUEUE_PREFIX_MATCH_MAX.
_REFRESH_PASSES, _NUM_REFRESHED = 32, 128


def scheduling_pass(state: EngineState) -> PassResult:
    """What SGLang does before every step."""
    if not len(state.decode):
        state.batch_is_full = False
    is_short = state.step_tokens > state.pool.room_tokens
    if not state.queue and state.chunked is None and not is_short:
        return PassResult()
    if isinstance(state.policy, StockPolicy):
        return _stock_pass(state, state.policy)
    plan = decide(state.view(), state.policy)
    if plan.order is None:
        return PassResult()
    state.headroom_steps = plan.headroom_steps
    state.queue = [state.queue[position] for position in plan.order]
    if plan.decode_only:
        return PassResult()
    return _carry_out(state, plan)


def _stock_pass(state: EngineState, policy: StockPolicy) -> PassResult:
    if state.chunked is None and state.batch_is_full:
        return PassResult()
    if state.chunked is None and state.free_slots <= 0:
        state.batch_is_full = True
        return PassResult()
    state.queue = stock_order(state.queue, policy, state.served_tokens, state.pool)
    return _admit(state, UNLIMITED, state.queue)


def _carry_out(state: EngineState, plan: Plan) -> PassResult:
    was_full = state.batch_is_full
    if plan.is_new:
        state.num_arrivals_planned = state.num_queued
    entering, gone, moved_tokens = _make_room(state, plan)
    rest = state.queue[len(entering) :]
    back = [progress for progress in entering if progress.swapped]
    fresh = [progress for progress in entering if not progress.swapped]
    resumed, left = _resume(state, back)
    rest = [*left, *rest]
    lifts_mark = was_full and bool(entering)
    if lifts_mark:
        state.batch_is_full = False
    elif plan.is_out_of_memory:  # who may use what they free is for the next plan
        state.batch_is_full, state.num_arrivals_planned = False, -1
    state.queue = [*fresh, *rest, *gone]
    result = PassResult()
    num_open = plan.num_open + (0 if was_full and plan.is_new else len(left))
    visible = [*fresh, *_open(plan, rest, num_open)]
    if not visible and not len(state.decode) and state.chunked is None:
        visible = [progress for progress in rest if not progress.swapped]
    if (visible or state.chunked is not None) and not _is_closed(state):
        result = _admit(state, plan.budget, visible)
    result.moved_tokens = moved_tokens + sum(progress.kv_tokens for progress in resumed)
    if lifts_mark and state.num_arrivals_planned >= 0:
        waiting = {*state.queue}
        state.batch_is_full |= not any(progress in waiting for progress in fresh)
    elif plan.is_new and not was_full and num_open > 0 and rest[0].swapped:
        state.batch_is_full |= state.num_arrivals_planned >= 0 and len(state.decode) > 0
    return result


def _admit(state: EngineState, budget: Budget, visible: list[Progress]) -> PassResult:
    """SGLang's own part. Every so often it tells its radix tree first who waits, unless its policy
    has just done so (SchedulePolicy._touch_waiting_prefixes)."""
    if not (isinstance(state.policy, StockPolicy) and state.policy.asks_tree):
        if state.num_passes % _REFRESH_PASSES == 0:
            for progress in reversed(visible[:_NUM_REFRESHED]):
                state.pool.found_tokens(progress)
        state.num_passes += 1
    return PrefillAdder(state, budget).run(visible)


def _is_closed(state: EngineState) -> bool:
    """Whether SGLang looks at nobody."""
    if state.chunked is not None:
        return False
    state.batch_is_full |= state.free_slots <= 0
    return state.batch_is_full


def _make_room(state: EngineState, plan: Plan) -> tuple[list[Progress], list[Progress], int]:
    """Those that may enter or come back, those that have left, and how many tokens of theirs are
    copied to host memory."""
    entering: list[Progress] = []
    gone: list[Progress] = []
    moved_tokens = 0
    running = {progress.job: progress for progress in state.decode} if plan.actions else {}
    for action in plan.actions:
        if isinstance(action, Yield):
            gone.append(running[action.job])
            moved_tokens += state.leave(running[action.job], action.way)
            state.num_yields[action.to is None, action.way] += 1
        else:
            entering.append(state.queue[len(entering)])
    return entering, gone, moved_tokens


def _resume(state: EngineState, back: list[Progress]) -> tuple[list[Progress], list[Progress]]:
    """Bring swapped requests back: those that are, and those for which there is no room."""
    for number, progress in enumerate(back):
        if not state.swap_in(progress):
            state.num_arrivals_planned = -1
            state.batch_is_full = False
            return back[:number], back[number:]
    return back, []


def _open(plan: Plan, rest: list[Progress], num_open: int) -> Iterable[Progress]:
    """Who may enter after those of the plan's actions."""
    may_enter = islice(rest, num_open)
    if plan.swapped_go_first:
        return takewhile(lambda progress: not progress.swapped, may_enter)
    return (progress for progress in may_enter if not progress.swapped)
