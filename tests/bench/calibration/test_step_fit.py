from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import yaml

from bench.calibration.fit import as_yaml
from bench.calibration.step_fit import fit
from sage_sched.config import SageConfig, StepTimeConfig

TRUTH = StepTimeConfig(
    prefill_base_ms=6.0,
    prefill_request_ms=0.5,
    prefill_token_ms=0.03,
    prefill_pair_ms=2e-6,
    decode_base_ms=4.0,
    decode_request_ms=0.6,
    decode_kv_token_ms=3e-4,
)


def windows(noise: float, num_windows: int = 400) -> list[list[float]]:
    """Steps of a server whose times are TRUTH's, but for relative noise."""
    rng = np.random.default_rng(0)
    step = TRUTH.step_time()
    rows = []
    for _ in range(num_windows):
        row = np.zeros(8)
        for _ in range(8):
            if rng.random() < 0.2:
                requests, tokens = int(rng.integers(1, 9)), int(rng.integers(10, 4000))
                pairs = tokens * rng.uniform(10, 2000)
                work = [1, requests, tokens, pairs, 0, 0, 0]
                seconds = step.prefill_s(requests, tokens, pairs)
            else:
                requests = int(rng.integers(1, 33))
                kv_tokens = requests * int(rng.integers(20, 1000))
                work = [0, 0, 0, 0, 1, requests, kv_tokens]
                seconds = step.decode_s(requests, kv_tokens)
            row += [*work, seconds * rng.lognormal(0, noise)]
        rows.append(row.tolist())
    return rows


def test_exact_times_give_the_coefficients_back() -> None:
    found = fit(windows(noise=0.0))
    assert found.mape < 1e-3
    for field in dataclasses.fields(StepTimeConfig):
        assert getattr(found.step_time, field.name) == pytest.approx(
            getattr(TRUTH, field.name), rel=1e-2
        )


def test_noise_shows_in_the_error_and_hardly_in_the_coefficients() -> None:
    found = fit(windows(noise=0.2, num_windows=2000))
    assert 0.02 < found.mape < 0.2
    assert found.step_time.decode_request_ms == pytest.approx(0.6, rel=0.1)
    assert found.step_time.decode_base_ms == pytest.approx(4.0, rel=0.2)


def test_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit(windows(0.0)[:5])
    only_decode = [[0, 0, 0, 0, 8, 8, 800, 0.05]] * 100
    with pytest.raises(ValueError, match="too few"):
        fit(only_decode)


def test_what_is_written_can_be_read_as_a_configuration() -> None:
    found = fit(windows(noise=0.0))
    config = SageConfig.parse(yaml.safe_load(as_yaml(found)))
    assert config.step_time == found.step_time
