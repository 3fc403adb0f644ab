"""Links requests of a log to the answers for which they waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.simulator.presets import Engine
from bench.simulator.result import alone_s
from bench.whatif.log import Logged

# At most this many earlier requests of a session are scanned, because a log may be one session.
_MOST_BEFORE = 64


class Link(NamedTuple):
    """The answer that a request waited for.

    follows: the index of that answer's request; None for none.
    pause_s: between that answer and this request.
    """

    follows: int | None = None
    pause_s: float = 0.0


def links_of(engine: Engine, requests: Sequence[Logged]) -> list[Link]:
    """Return a link for each request, in order of arrival.

    A request follows its parent, or the last request of its session that had ended when it came. If
    the log does not say when requests ended, it follows the last request of its session. Its pause
    is then the time between the two arrivals, minus the time that the earlier request takes alone
    on the engine.
    """
    by_id: dict[str, int] = {}
    by_session: dict[str, list[int]] = {}
    links = []
    for place, request in enumerate(requests):
        earlier = by_session.setdefault(request.session, []) if request.session else []
        before = by_id.get(request.parent)
        if before is None:
            before = _last_ended(requests, earlier, request)
        links.append(Link() if before is None else _link(engine, requests, before, request))
        if request.id:
            by_id[request.id] = place
        earlier.append(place)
    return links


def _last_ended(requests: Sequence[Logged], earlier: Sequence[int], request: Logged) -> int | None:
    if not earlier or request.pause_s is not None:
        return earlier[-1] if earlier else None
    knows_ends = False
    for place in reversed(earlier[-_MOST_BEFORE:]):
        before = requests[place]
        if before.ttlt_s is not None:
            knows_ends = True
            if before.arrival_s + before.ttlt_s <= request.arrival_s:
                return place
    return None if knows_ends else earlier[-1]


def _link(engine: Engine, requests: Sequence[Logged], before: int, request: Logged) -> Link:
    if request.pause_s is not None:
        return Link(before, request.pause_s)
    first = requests[before]
    took_s = first.ttlt_s or alone_s(engine, first.input_tokens, first.output_tokens)
    return Link(before, max(0.0, request.arrival_s - first.arrival_s - took_s))
