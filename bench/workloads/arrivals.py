"""Draws arrival times at a mean rate of one per second. A run divides them by its rate."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.workloads.datasets import checked_rows
from bench.workloads.prompts import WorkloadError
from sage_sched.fields import ConfigError

# pulse: a few hundred Poisson arrivals, as in the paper; most requests are served after the last
# has arrived. sustained: Poisson arrivals, long enough that the time after the last matters little.
# batch: all at once.
LOADS = ("pulse", "sustained", "batch")
# An experiment may use this too: a stretch of the arrival times in RECORDING.
RECORDED = "recorded"
RECORDING = "trace_azure2023_conv.jsonl.gz"
# And this: Poisson arrivals for QUIET_S at QUIET_RATIO of the capacity, then for RUSH_S at the
# rate. Results cover only the latter.
RUSH = "rush"
QUIET_RATIO, QUIET_S, RUSH_S = 0.2, 3600.0, 60.0
PULSE_REQUESTS = 300
# The length of a sustained load, in service times of a full server. If a request waits for one
# service time, this is five times the mean TTLT.
SUSTAINED_SERVICE_TIMES = 10.0


def arrivals_of(load: str, num_requests: int, seed: int) -> NDArray[np.float64]:
    """Return the times of one of LOADS, ascending, the first at 0, shape (num_requests,)."""
    return np.zeros(num_requests) if load == "batch" else poisson_arrivals(num_requests, seed)


def num_requests_of(load: str, rate_per_s: float, service_s: float) -> int:
    """Return the number of requests of one of LOADS.

    service_s: see bench.engines.baseline.Saturation.
    """
    if load == "sustained":
        return max(1, math.ceil(rate_per_s * service_s * SUSTAINED_SERVICE_TIMES))
    return PULSE_REQUESTS


def poisson_arrivals(num_requests: int, seed: int) -> NDArray[np.float64]:
    """Return ascending times in seconds with exponential gaps of mean 1 s, shape
    (num_requests,)."""
    gaps = np.random.default_rng([seed, 1]).exponential(1.0, num_requests)
    return np.asarray(np.cumsum(gaps) - gaps[0])


def rush_arrivals(rate_per_s: float, capacity: float, seed: int) -> NDArray[np.float64]:
    """Return the times of RUSH in seconds, ascending. capacity: in requests per second."""
    quiet_per_s = QUIET_RATIO * capacity
    num_quiet, num_rush = math.ceil(quiet_per_s * QUIET_S), math.ceil(rate_per_s * RUSH_S)
    times = poisson_arrivals(num_quiet + num_rush, seed)
    quiet_s, rush_s = times[:num_quiet] / quiet_per_s, times[num_quiet:] - times[num_quiet]
    return np.concatenate((quiet_s[quiet_s < QUIET_S], QUIET_S + rush_s / rate_per_s))


def trace_arrivals(path: Path, num_requests: int, seed: int) -> NDArray[np.float64]:
    """Return a random stretch of a recorded trace, scaled to one arrival per second on average.

    The trace is a table of rows with a field "t" in seconds, as predictor_store reads them (JSON
    lines, gzip too). Raises WorkloadError with the row that lacks the field.
    """
    times = np.sort([float(row["t"]) for row in checked_rows(path, t=int | float)])
    if times.size <= num_requests:
        raise WorkloadError(f"{path} has {times.size} arrivals, {num_requests + 1} are needed")
    first = int(np.random.default_rng([seed, 1]).integers(times.size - num_requests))
    stretch = times[first : first + num_requests + 1] - times[first]
    if not stretch[-1] > 0:
        raise WorkloadError(f"{path}: arrivals {first} to {first + num_requests} are at one time")
    return np.asarray(stretch[:-1] * (num_requests / stretch[-1]))


def requests_per_s(rate: str, capacity: float) -> float:
    """Return a rate in requests/s. Raises ValueError with the allowed values."""
    number = rate.removesuffix("x")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ConfigError(f"rate is {rate!r}, allowed: requests/s above 0 (3.5) or a multiple (2x)")
    return value * capacity if rate.endswith("x") else value
