"""Computes the requests per second within an SLO: the largest rate at which enough requests are
good."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from bench.experiment.records import Record
from bench.experiment.spec import TUNED
from bench.experiment.stats import ordered

SHARES = (0.95, 0.99)


def mix_of(record: Record) -> str:
    """Return the record's load without its rate: "chat" of "chat, 1.2x"."""
    return record.load.rpartition(", ")[0]


def multiple_of(record: Record) -> float:
    """Return the multiple in a load's name: 1.2 of "chat, 1.2x"."""
    return float(record.load.rpartition(", ")[2].removesuffix("x"))


def rate_within(points: Iterable[tuple[float, float]], share: float) -> float:
    """Return the largest rate at which this share of requests is good.

    Between two rates the share is assumed to be linear. The result is 0 if the share is missed at
    the smallest rate, and the largest rate if it is never missed.

    points: rates, and the share of good requests at each.
    """
    below = 0.0, 1.0
    for rate, good in sorted(points):
        if good < share:
            if below[0] == 0.0:
                return 0.0
            return below[0] + (rate - below[0]) * (below[1] - share) / (below[1] - good)
        below = rate, good
    return below[0]


def rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return a table's head, and a row per mix and arm: medians over seeds, and ratios paired by
    seed.

    The ratios are to the tuned stock server, which is the first arm of each mix, and to `fcfs`.
    """
    head = ["mix", "policy"]
    for share in SHARES:
        head += [f"requests/s, {share:.0%} good", "to tuned", "to fcfs"]
    body = []
    for mix in ordered(map(mix_of, records)):
        here = [record for record in records if mix_of(record) == mix]
        arms = ordered(record.arm for record in here)
        rates = {share: _rates(here, share) for share in SHARES}
        for arm in arms:
            cells = [mix, f"`{arm}`"]
            for share in SHARES:
                ours = rates[share][arm]
                cells.append(f"{np.median([*ours.values()]):.2f}")
                cells += [_ratio(ours, rates[share].get(to, {})) for to in (arms[0], "fcfs")]
            body.append(cells)
    return head, body


def figure(records: Sequence[Record], mix: str, arms: str, share: float) -> str:
    """Return the requests per second of an arm, or the median ratio of `ARM/REFERENCE`; "" if there
    are none. TUNED is the first arm."""
    here = [record for record in records if mix_of(record) == mix]
    rates = _rates(here, share)
    ours, *theirs = (
        rates.get(here[0].arm if here and arm == TUNED else arm, {}) for arm in arms.split("/")
    )
    if theirs:
        return _ratio(ours, theirs[0]).partition(" ")[0]
    return f"{np.median([*ours.values()]):.2f}" if ours else ""


def _rates(records: Sequence[Record], share: float) -> dict[str, dict[int, float]]:
    """Return the rates by arm and seed."""
    of = defaultdict[tuple[str, int], list[Record]](list)
    for record in records:
        of[record.arm, record.seed].append(record)
    found = defaultdict[str, dict[int, float]](dict)
    for (arm, seed), here in of.items():
        points = [(r.metrics["offered_rate"], r.metrics["good_share"]) for r in here]
        found[arm][seed] = rate_within(points, share)
    return found


def _ratio(ours: dict[int, float], theirs: dict[int, float]) -> str:
    """Return the median over seeds, and the range of all; "" if the reference is 0 at each seed."""
    ratios = [rate / theirs[seed] for seed, rate in ours.items() if theirs.get(seed)]
    if not ratios:
        return ""
    return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
