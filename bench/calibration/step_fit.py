"""From what steps had to do and how long they took to the coefficients of a StepTime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from patches.step_meter import COLUMNS
from sage_sched.config import StepTimeConfig

# The columns' coefficients, in the same order; what a window took is what is fitted.
_FIELDS = (
    "prefill_base_ms", "prefill_request_ms", "prefill_token_ms", "prefill_pair_ms",
    "decode_base_ms", "decode_request_ms", "decode_kv_token_ms",
)  # fmt: skip
_HELD_OUT = 5


@dataclass(frozen=True, slots=True)
class StepFit:
    """step_time: the coefficients. mape: mean absolute error of the held-out windows' times, as a
    share of them. num_windows: fitted and held out."""

    step_time: StepTimeConfig
    mape: float
    num_windows: int


def fit(windows: Sequence[Sequence[float]]) -> StepFit:
    """windows: rows of patches.step_meter.COLUMNS. Every fifth is held out.

    Non-negative least squares of relative errors, so that a short window counts as much as a long
    one. Raises ValueError where there are too few windows, or none with prefill or decode.
    """
    table = np.asarray(windows, dtype=np.float64).reshape(-1, len(COLUMNS))
    table = table[table[:, -1] > 0]
    work, seconds = table[:, :-1], table[:, -1]
    if len(table) < 4 * len(_FIELDS) or not (work[:, 0].any() and work[:, 4].any()):
        raise ValueError(f"{len(table)} windows of steps are too few to fit {len(_FIELDS)} numbers")
    held_out = np.arange(len(table)) % _HELD_OUT == 0
    relative = work / seconds[:, None]
    # Columns of like size: pairs outnumber steps a millionfold.
    scale = np.maximum(relative.max(axis=0), 1e-300)
    solution, _ = nnls(relative[~held_out] / scale, np.ones(int((~held_out).sum())))
    coefficients = solution / scale
    errors = work[held_out] @ coefficients / seconds[held_out] - 1
    step_time = StepTimeConfig(
        **{name: float(f"{1e3 * c:.6g}") for name, c in zip(_FIELDS, coefficients, strict=True)}
    )
    return StepFit(step_time, float(np.abs(errors).mean()), len(table))
