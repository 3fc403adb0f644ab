"""Counts the tokens of a leap of decode steps that are on time."""

from __future__ import annotations

import numpy as np


def num_on_time(
    num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float
) -> int:
    """Return the number of decode steps whose token is on time. Each step takes growth_s longer
    than the one before.

    due_s: the deadline of the first token, from now; each further one has tpot_s more.
    """
    if num_steps == 1:
        return int(first_s <= due_s)
    if first_s + growth_s * (num_steps - 1) <= tpot_s:  # each token has more time than the last
        last = num_steps - 1
        if first_s <= due_s:
            return num_steps
        if num_steps * (first_s + growth_s * last / 2) > due_s + last * tpot_s:
            return 0
    before = np.arange(num_steps, dtype=np.float64)
    number = before + 1
    came_s = number * first_s + growth_s * (number * before / 2)
    dues_s = np.full(num_steps, due_s)
    dues_s[1:] += before[1:] * tpot_s
    return int((came_s <= dues_s).sum())
