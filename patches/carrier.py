"""How a length distribution travels from the HTTP process to the schedulers.

As flat lists under reserved keys of `sampling_params.custom_params`, the one part of a request
that every hop of SGLang passes on as it is (sglang/srt/sampling/sampling_params.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sage_sched.distribution import LengthDistribution

_PREFIX = "__sage_"
_LENGTHS, _WEIGHTS = _PREFIX + "lengths", _PREFIX + "weights"
_SAMPLES, _SOURCE = _PREFIX + "samples", _PREFIX + "source"


def encode(distribution: LengthDistribution) -> dict[str, Any]:
    """The reserved keys and their values."""
    return {
        _LENGTHS: distribution.lengths.tolist(),
        _WEIGHTS: distribution.weights.tolist(),
        _SAMPLES: distribution.effective_samples,
        _SOURCE: distribution.source,
    }


def decode(custom_params: object) -> LengthDistribution | None:
    """What travels in a request's custom_params, or None. Raises ValueError if it is garbled."""
    if not isinstance(custom_params, Mapping) or _LENGTHS not in custom_params:
        return None
    try:
        return LengthDistribution(
            np.asarray(custom_params[_LENGTHS], dtype=np.int64),
            np.asarray(custom_params[_WEIGHTS], dtype=np.float64),
            float(custom_params[_SAMPLES]),
            custom_params[_SOURCE],
        )
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"garbled length distribution: {error!r}") from error


def strip(custom_params: object) -> object:
    """custom_params without the reserved keys, so that no client writes himself a short job."""
    if not isinstance(custom_params, Mapping):
        return custom_params
    return {
        key: value
        for key, value in custom_params.items()
        if not (isinstance(key, str) and key.startswith(_PREFIX))
    }
