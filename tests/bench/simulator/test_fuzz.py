"""A few seeds of the fuzzer; the nightly run has more."""

from __future__ import annotations

import pytest

from tests.bench.simulator.fuzz import found_at


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_breaks_nothing(seed: int) -> None:
    assert not found_at(seed)
