"""A few seeds of the fuzzer; the nightly run has more."""

from __future__ import annotations

import pytest

from tests.bench.simulator.fuzz import found_at


@pytest.mark.parametrize(
    "seed",
    [
        68,  # two promised requests of different adapters, one of which has room
        1287,  # a promised prompt fills the pass in which a swapped request would come back
        *range(1, 6),
    ],
)
def test_random_traffic_finds_nothing(seed: int) -> None:
    assert not found_at(seed)
