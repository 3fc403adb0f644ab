"""Computes the requests per second within an SLO: the largest rate at which enough requests are
good."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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


class Rate(NamedTuple):
    """A rate in requests per second, or the end of the sweep that did not reach it.

    sign: "≥" if the largest rate tried is still good enough, "<" if the smallest is not.
    """

    per_s: float
    sign: str = ""


def rate_within(points: Iterable[tuple[float, float]], share: float) -> Rate:
    """Return the largest rate at which this share of requests is good.

    Between two rates the share is assumed to be linear.

    points: rates, and the share of good requests at each.
    """
    first, *later = sorted(points)
    if first[1] < share:
        return Rate(first[0], "<")
    below = first
    for rate, good in later:
        if good < share:
            part = (below[1] - share) / (below[1] - good)
            return Rate(below[0] + (rate - below[0]) * part)
        below = rate, good
    return Rate(below[0], "≥")


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
        here = _of_mix(records, mix)
        arms = ordered(record.arm for record in here)
        rates = {share: _rates(here, share) for share in SHARES}
        for arm in arms:
            cells = [mix, f"`{arm}`"]
            for share in SHARES:
                ours = rates[share][arm]
                cells.append(_median([*ours.values()]))
                cells += [_ratio(ours, rates[share].get(to, {})) for to in (arms[0], "fcfs")]
            body.append(cells)
    return head, body


def figure(records: Sequence[Record], mix: str, arms: str, share: float) -> str:
    """Return the requests per second of an arm, or the median ratio of `ARM/REFERENCE`; "" if there
    are none. TUNED is the first arm."""
    here = _of_mix(records, mix)
    rates = _rates(here, share)
    ours, *theirs = (
        rates.get(here[0].arm if here and arm == TUNED else arm, {}) for arm in arms.split("/")
    )
    if theirs:
        return _ratio(ours, theirs[0]).partition(" (")[0]
    return _median([*ours.values()]) if ours else ""


def metric_within(
    records: Sequence[Record], mix: str, arm: str, metric: str, share: float
) -> float:
    """Return an arm's metric at the largest rate at which this share of requests is good: the
    median over seeds, NaN if there is none. Between two rates it is assumed to be linear."""
    ours = [record for record in _of_mix(records, mix) if record.arm == arm]
    at = []
    for seed, rate in _rates(ours, share)[arm].items():
        numbers = [record.metrics for record in ours if record.seed == seed]
        points = sorted((each["offered_rate"], each.get(metric, math.nan)) for each in numbers)
        at.append(np.interp(rate.per_s, *np.array(points).T))
    return float(np.median(at)) if at else math.nan


def _of_mix(records: Sequence[Record], mix: str) -> list[Record]:
    return [record for record in records if mix_of(record) == mix]


def _rates(records: Sequence[Record], share: float) -> dict[str, dict[int, Rate]]:
    """Return the rates by arm and seed."""
    of = defaultdict[tuple[str, int], list[Record]](list)
    for record in records:
        of[record.arm, record.seed].append(record)
    found = defaultdict[str, dict[int, Rate]](dict)
    for (arm, seed), here in of.items():
        points = [(r.metrics["offered_rate"], r.metrics["good_share"]) for r in here]
        found[arm][seed] = rate_within(points, share)
    return found


def _median(rates: Sequence[Rate]) -> str:
    sign = sorted(rates)[len(rates) // 2].sign
    return f"{sign} {np.median([rate.per_s for rate in rates]):.2f}".strip()


def _ratio(ours: dict[int, Rate], theirs: dict[int, Rate]) -> str:
    """Return the median over seeds, and the range of all; "" if the sweep allows no statement."""
    pairs = [(rate, theirs[seed]) for seed, rate in ours.items() if seed in theirs]
    ratios = [
        Rate(one.per_s / other.per_s, _sign(one, other))
        for one, other in pairs
        if not one.sign or one.sign != other.sign
    ]
    if not ratios:
        return ""
    numbers = [ratio.per_s for ratio in ratios]
    return f"{_median(ratios)} ({min(numbers):.2f} to {max(numbers):.2f})"


def _sign(one: Rate, other: Rate) -> str:
    """Return whether the ratio of two rates is a bound."""
    if one.sign == "≥" or other.sign == "<":
        return "≥"
    return "≤" if one.sign or other.sign else ""
