"""How many tokens of a leap of decode steps are on time."""

from __future__ import annotations

import math


def num_on_time(
    num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float
) -> int:
    """The number of decode steps whose token is on time. Each step takes growth_s longer than the
    one before, so token j comes after `j first_s + growth_s j (j-1) / 2`.

    due_s: when the first token is due, from now; each further one tpot_s later. By how much token
    j is late is a convex function of j, so the tokens on time are neighbours, between its roots.
    """
    if num_steps <= 0 or due_s == math.inf:
        return max(0, num_steps)
    if tpot_s == math.inf:
        return num_steps if first_s <= due_s else num_steps - 1

    def is_late(j: int) -> bool:
        return j * first_s + growth_s * (j * (j - 1) / 2) > due_s + (j - 1) * tpot_s

    half = growth_s / 2
    linear, constant = first_s - half - tpot_s, tpot_s - due_s
    if half * num_steps * num_steps <= 1e-12 * max(first_s, tpot_s):
        if linear == 0:
            return 0 if is_late(1) else num_steps
        root = -constant / linear
        low, high = (root, math.inf) if linear < 0 else (-math.inf, root)
    else:
        square = linear * linear - 4 * half * constant
        if square < 0:
            return 0
        # Of the two ways to write a root, the one without cancellation.
        far = -(linear + math.copysign(math.sqrt(square), linear)) / 2
        low, high = sorted((far / half, constant / far)) if far else (0.0, 0.0)
    first = max(1, math.ceil(max(low, 0.0) - 1e-9))
    last = min(num_steps, math.floor(min(high, num_steps) + 1e-9))
    # By a rounding error one may be taken for another.
    while first <= last and is_late(first):
        first += 1
    while last >= first and is_late(last):
        last -= 1
    while first > 1 and first <= num_steps + 1 and not is_late(first - 1):
        first -= 1
    while last < num_steps and not is_late(max(last, 0) + 1):
        last += 1
    return max(0, last - first + 1)
