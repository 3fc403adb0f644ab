"""Links requests of a log to the answers for which they waited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.simulator.presets import Engine
from bench.simulator.result import alone_s
from bench.whatif.log import Logged


class Link(NamedTuple):
    """The answer that a request waited for.

    follows: the index of that answer's request; None for none.
    pause_s: between that answer and this request.
    """

    follows: int | None = None
    pause_s: float = 0.0


class Sessions(NamedTuple):
    """The links of a log's requests, in order of arrival.

    num_supposed: links that only rest on equal sessions and times. num_beside: requests whose
        sessions do not count, because two of a session ran at the same time.
    """

    links: list[Link]
    num_supposed: int = 0
    num_beside: int = 0

    def lines(self) -> list[str]:
        """Return remarks and cautions for the user."""
        lines, num_requests = [], len(self.links)
        if num_known := sum(link.follows is not None for link in self.links) - self.num_supposed:
            lines.append(f"sessions: {num_known} requests wait for another's answer and a pause")
        if self.num_supposed:
            lines.append(
                f"CAUTION: {self.num_supposed} of {num_requests} requests are taken to wait for "
                "another's answer and a pause, because they have its session and came after its "
                "end. If their clients do not wait, remove that field: load is then too low here"
            )
        if self.num_beside:
            lines.append(
                f"sessions: {self.num_beside} requests wait for none, because requests of their "
                "session overlap in time"
            )
        return lines


def sessions_of(engine: Engine, requests: Sequence[Logged]) -> Sessions:
    """Return the links of requests in order of arrival.

    A request follows its parent, or else the request before it in its session, if that had ended
    when it came. If two requests of a session overlap in time, they do not wait for each other.
    Such a session is a load test or a batch, for example, and no conversation. If the log does not
    say when a request ended, it took the time that it takes alone on the engine. A recorded pause
    holds in any case.
    """
    # The error of the log's times.
    error_s = 1.0 if all(request.arrival_s.is_integer() for request in requests) else 1e-3
    beside = _overlapping(engine, requests, error_s)
    by_id: dict[str, int] = {}
    last_of: dict[str, int] = {}
    links, num_supposed = [], 0
    for place, request in enumerate(requests):
        before = by_id.get(request.parent)
        if before is not None and _overlap_s(requests[before], request) > error_s:
            before = None
        is_recorded = request.pause_s is not None
        if before is None and (is_recorded or request.session not in beside):
            before = last_of.get(request.session)
            num_supposed += before is not None and not is_recorded
        links.append(Link() if before is None else _link(engine, requests[before], before, request))
        if request.id:
            by_id[request.id] = place
        if request.session:
            last_of[request.session] = place
    num_beside = sum(request.session in beside for request in requests)
    return Sessions(links, num_supposed, num_beside)


def _overlapping(engine: Engine, requests: Sequence[Logged], error_s: float) -> set[str]:
    """Return the sessions in which requests overlap in time, though no pauses are recorded."""
    ends_s: dict[str, float] = {}
    found = set()
    for request in requests:
        if not request.session or request.pause_s is not None:
            continue
        end_s = request.arrival_s + _took_s(engine, request)
        if (last_s := ends_s.get(request.session)) is not None:
            if last_s - request.arrival_s > error_s:
                found.add(request.session)
            end_s = max(end_s, last_s)
        ends_s[request.session] = end_s
    return found


def _overlap_s(before: Logged, request: Logged) -> float:
    return before.arrival_s + (before.ttlt_s or 0.0) - request.arrival_s


def _took_s(engine: Engine, request: Logged) -> float:
    return request.ttlt_s or alone_s(engine, request.input_tokens, request.output_tokens)


def _link(engine: Engine, before: Logged, place: int, request: Logged) -> Link:
    if request.pause_s is not None:
        return Link(place, request.pause_s)
    return Link(place, max(0.0, request.arrival_s - before.arrival_s - _took_s(engine, before)))
