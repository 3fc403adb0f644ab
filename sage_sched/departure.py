"""How a running job leaves the device, and who leaves when memory runs out."""

from __future__ import annotations

from typing import NamedTuple

from sage_sched.admission import Headroom
from sage_sched.job import Job
from sage_sched.order import retention_order
from sage_sched.plan import Way, Yield
from sage_sched.policy import Policy
from sage_sched.view import Holding, SchedulerView

_MEMORY_RUNS_OUT = "memory runs out, and it is the last of the order"


class Departure(NamedTuple):
    """How a running job leaves, and what that costs and frees.

    price_s: seconds that the server takes to move it out and back.
    freed_tokens: KV that nobody else holds, and what was set aside for the job's next steps.
    host_tokens: KV that goes to host memory.
    """

    way: Way
    price_s: float
    freed_tokens: int
    host_tokens: int = 0


class Victim(NamedTuple):
    """A running job that leaves, and how."""

    job: Job
    departure: Departure


def departure_of(
    holding: Holding,
    aside_tokens: int,
    host_free_tokens: int,
    view: SchedulerView,
    *,
    is_last_resort: bool = False,
) -> Departure | None:
    """How a running job would leave; None if its KV would have to be computed again and may not be.

    All of its KV goes to host memory if there is room. It is computed again only as a last resort,
    because it is then rounded differently, which may change sampled text. Until somebody needs the
    memory, it stays in the radix tree.

    is_last_resort: memory runs out. The engine would compute it again, so we may too.
    """
    freed_tokens = holding.freed_tokens + aside_tokens
    if holding.kv_tokens <= host_free_tokens:
        swap_s = view.server.swap_s(holding.kv_tokens)
        return Departure(Way.SWAP, swap_s, freed_tokens, holding.kv_tokens)
    if holding.stays_whole or not is_last_resort:
        return None
    recompute_s = view.server.recompute_s(holding.kv_tokens, holding.cached_tokens)
    return Departure(Way.LEAVE, recompute_s, freed_tokens)


def make_room(view: SchedulerView, policy: Policy, headroom: Headroom) -> list[Yield]:
    """Who leaves when memory runs out: from the end of the order, until the others have their
    headroom. The first of the order, or a prompt that is being chunked, goes on.

    Only the place counts: picking those with the most or the least KV from the last quarter of the
    order was no better (H800 preset, four loads: mean TTLT within 1 %).
    """
    needed_tokens = headroom.set_aside_tokens(view.running)
    short_tokens = sum(needed_tokens) - view.room_tokens
    order = retention_order(view.running, range(len(view.running)), policy, view)
    if view.chunked is None:
        order = order[1:]
    else:
        short_tokens += headroom.needed_tokens(view.chunked) - view.chunked.prefilled_tokens
    host_free_tokens = view.host_free_tokens
    yields: list[Yield] = []
    for position in reversed(order):
        if short_tokens <= 0:
            break
        job = view.running[position]
        holding = view.holding(job)
        if holding is None or not holding.freed_tokens:
            continue
        aside_tokens = needed_tokens[position]
        leaving = departure_of(holding, aside_tokens, host_free_tokens, view, is_last_resort=True)
        if leaving is None:
            continue
        host_free_tokens -= leaving.host_tokens
        short_tokens -= leaving.freed_tokens
        yields.append(Yield(job, leaving.way, _MEMORY_RUNS_OUT))
    return yields
