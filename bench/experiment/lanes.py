"""Draws when requests waited: a line per request, a lane per policy, on one time scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

_LINE_PX = 3
_WAITS, _ANSWERED, _OURS = "#aaaaaa", "#4c78a8", "#d62728"


@dataclass(frozen=True, slots=True)
class Lane:
    """The times of one run's requests, in seconds of one clock.

    arrival_s, first_s, last_s: when each request, its first token and its last token arrived, shape
        (requests,).
    pauses_s: for each request, the start and end of each pause of its answer.
    """

    title: str
    arrival_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    pauses_s: Sequence[Sequence[Sequence[float]]]
    is_ours: bool = False


def picture(lanes: Sequence[Lane]) -> str:
    """Return the lanes as HTML; "" if there are none. The text is not in the SVG: the SVG stretches
    with the screen, and its text would be unreadable on a narrow one."""
    if not lanes:
        return ""
    end_s = _end_s(lanes)
    parts = [_lane(lane, end_s) for lane in lanes]
    ticks = np.linspace(0, end_s, 5)
    axis = "".join(f"<span>{tick:.0f} s</span>" for tick in ticks)
    return "\n".join(
        [
            '<figure class="lanes">',
            *parts,
            f'<div class="axis">{axis}</div>',
            "<figcaption>Each line is one request, in order of arrival. It is grey while the "
            "request waits for its first token or is swapped out, and coloured while tokens "
            "arrive.</figcaption></figure>",
        ]
    )


def svg(lanes: Sequence[Lane]) -> str:
    """Return the lanes as one SVG with its own text, for pages that show it 300 to 600 px wide. It
    follows a dark page."""
    end_s, top, parts = _end_s(lanes), 0, []
    for lane in lanes:
        bars, height = _bars(lane, end_s)
        scaled = f'<g transform="translate(0 {top + 24}) scale(0.48 0.5)">{bars}</g>'
        parts += [f'<text x="0" y="{top + 16}">{escape(lane.title)}</text>', scaled]
        top += height // 2 + 32
    anchors = ("start", "middle", "middle", "middle", "end")
    for i, (tick, anchor) in enumerate(zip(np.linspace(0, end_s, 5), anchors, strict=True)):
        where = f'x="{120 * i}" y="{top + 14}" text-anchor="{anchor}"'
        parts.append(f"<text {where}>{tick:.0f} s</text>")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {top + 20}" width="480">'
        "<style>text{font:14px system-ui,sans-serif;fill:#24292f}"
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}</style>"
        f"{''.join(parts)}</svg>\n"
    )


def _end_s(lanes: Sequence[Lane]) -> float:
    return max(float(lane.last_s.max() - lane.arrival_s.min()) for lane in lanes)


def _lane(lane: Lane, end_s: float) -> str:
    bars, height = _bars(lane, end_s)
    return (
        f"<h3>{escape(lane.title)}</h3>"
        f'<svg viewBox="0 0 1000 {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(lane.title)}" style="width:100%;height:{height}px">{bars}</svg>'
    )


def _bars(lane: Lane, end_s: float) -> tuple[str, int]:
    """Return a lane's lines, 1000 wide, and their height in px."""
    color = _OURS if lane.is_ours else _ANSWERED
    began_s = float(lane.arrival_s.min())
    order = np.argsort(lane.arrival_s, kind="stable")

    def x(at_s: float) -> float:
        return (at_s - began_s) / end_s * 1000

    bars = []
    for row, i in enumerate(order):
        y = row * _LINE_PX + _LINE_PX / 2
        arrival, first, last = (x(at[i]) for at in (lane.arrival_s, lane.first_s, lane.last_s))
        answered = [(first, max(last, first + 1), color)]
        paused = [(x(start_s), x(until_s), _WAITS) for start_s, until_s in lane.pauses_s[i]]
        for start, end, stroke in [(arrival, first, _WAITS), *answered, *paused]:
            bars.append(f'<path d="M{start:.1f} {y}H{end:.1f}" stroke="{stroke}"/>')
    lines = f'<g stroke-width="{_LINE_PX - 1}">{"".join(bars)}</g>'
    return lines, _LINE_PX * len(order)
