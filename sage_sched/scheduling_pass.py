"""Carries out the plan of one scheduling pass on an engine, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from sage_sched.followed import in_front
from sage_sched.plan import Budget, Plan, Preempt
from sage_sched.scheduler import Scheduler

Request = TypeVar("Request")


class Engine(Protocol[Request]):
    """The operations of an engine in a pass: SGLang (patches/scheduler/executor.py) or the
    simulator.

    core: makes its plans.
    queue: the waiting requests; set here in the order to serve them.
    is_full: SGLang's mark: no request is admitted until one leaves.
    """

    core: Scheduler
    queue: list[Request]
    is_full: bool

    @property
    def runs_any(self) -> bool:
        """Whether any request decodes."""

    @property
    def is_chunking(self) -> bool:
        """Whether a prompt is in the middle of its prefill."""

    def plan(self) -> Plan:
        """Return the plan of this pass."""

    def is_swapped(self, request: Request) -> bool:
        """Whether the request's KV is in host memory."""

    def preempt(self, actions: Sequence[Preempt]) -> list[Request]:
        """Take running requests off the device, up to the first for which that fails. Return
        them."""

    def resume(self, requests: Sequence[Request]) -> list[Request]:
        """Let swapped requests decode on, at once or from the next pass on. Return the requests for
        which there is no room."""

    def carried_out(
        self, plan: Plan, entering: list[Request], left: list[Request], preempted: list[Request]
    ) -> None:
        """Note the outcome of the actions.

        left: the entering requests that found no room, and the requests that would have overtaken
            them.
        """

    def admit(self, visible: Sequence[Request], budget: Budget) -> None:
        """Run the engine's own pass. It sees only these waiting requests, and prefills as many as
        find room within the budget. The other requests stay in the queue, behind the visible ones
        that are not prefilled.

        SGLang prefills the next chunk of a prompt in every pass, and fails if there is no room for
        it. So before that pass the last requests of the order are retracted, as SGLang does before
        a decode step, until the chunk and a decode step have room. Even the last running request
        may be retracted.
        """

    def decode_only(self) -> None:
        """Run the engine's own pass without a prefill. If the running requests need the memory of a
        prompt that is being chunked, the chunk goes on."""


def run_pass(engine: Engine[Request]) -> None:
    """Plan a pass and carry the plan out. The engine's own pass never sees a swapped request,
    because it would prefill it."""
    plan = engine.plan()
    if plan.order:
        engine.queue = in_front(engine.queue, plan.order)
    if plan.decode_only:
        engine.decode_only()
        return
    was_full = engine.is_full
    entering, preempted = _make_room(plan, engine)
    back = [request for request in entering if engine.is_swapped(request)]
    fresh = [request for request in entering if request not in back]
    left = engine.resume(back) if back else []
    if left:
        _plan_again(engine)
        # No request behind the first one overtakes it. A plan can be wrong about the room: if a new
        # request shares KV with its victim alone, that KV counts twice, as freed by the victim and
        # as shared.
        behind = entering[entering.index(left[0]) :]
        left = [request for request in behind if request in left or request in fresh]
        fresh = [request for request in fresh if request not in left]
    engine.carried_out(plan, entering, left, preempted)
    # If the batch is full, a request enters only by preempting one. For that, the mark is_full is
    # lifted.
    lifts_mark = was_full and bool(entering)
    if lifts_mark:
        engine.is_full = False
    rest = [*left, *engine.queue[len(entering) :]]
    engine.queue = [*fresh, *rest, *preempted]
    num_planned = sum(not isinstance(action, Preempt) for action in plan.actions)
    num_left_out = num_planned - len(entering) + len(left)
    num_open = plan.num_open + (0 if was_full and plan.is_new else num_left_out)
    visible = [*fresh, *_open(plan, rest, num_open, engine)]
    if not visible and not engine.runs_any and not engine.is_chunking:
        # A swapped request has just found no room, and no request is about to free any: streaming
        # sessions hold it between turns, for example.
        visible = [request for request in rest if not engine.is_swapped(request)]
    engine.admit(visible, plan.budget)
    # If visible requests are left, they are first in the queue.
    waiting = {id(request) for request in engine.queue[: len(visible)]}
    enters_all = not any(id(request) in waiting for request in fresh)
    if not enters_all or not all(id(request) in waiting for request in visible[len(fresh) :]):
        engine.core.last_plan.reordered()
    if engine.core.last_plan.num_arrivals < 0:
        return
    if lifts_mark:
        if enters_all:
            engine.is_full = True
    elif plan.is_new and not was_full and num_open > 0 and engine.is_swapped(rest[0]):
        # The swapped request found no room. The engine sets the mark only for requests that it
        # sees. Without the mark, a plan would be made before every step.
        engine.is_full = engine.is_full or engine.runs_any


def _make_room(plan: Plan, engine: Engine[Request]) -> tuple[list[Request], list[Request]]:
    """Return the requests that may be admitted or resumed, and the preempted ones, up to an action
    that fails.

    If requests were preempted and none enters, the next plan decides which requests use their room.
    """
    leaving = [action for action in plan.actions if isinstance(action, Preempt)]
    preempted = engine.preempt(leaving) if leaving else []
    entering: list[Request] = []
    num_gone = 0
    for action in plan.actions:
        if not isinstance(action, Preempt):
            entering.append(engine.queue[len(entering)])
            continue
        num_gone += 1
        if num_gone > len(preempted):
            _plan_again(engine)
            break
    if preempted and (plan.has_turn or not entering):
        _plan_again(engine)
    return entering, preempted


def _plan_again(engine: Engine[Request]) -> None:
    """Plan again before the next step, because there may be free room."""
    engine.is_full = False
    engine.core.plan_again()


def _open(
    plan: Plan, rest: Iterable[Request], num_open: int, engine: Engine[Request]
) -> Iterable[Request]:
    """Return the requests that may enter after those of the plan's actions, among the first
    num_open. Swapped requests do not enter this way. If they go first, no request overtakes
    them."""
    visible = [*islice(rest, num_open)]
    are_swapped = [*map(engine.is_swapped, visible)]
    if plan.swapped_go_first:
        return visible[: (*are_swapped, True).index(True)]
    return [one for one, is_swapped in zip(visible, are_swapped, strict=True) if not is_swapped]
