from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from predictor_store.predict.quality import WINDOW, Forecast, RollingQuality, spearman
from sage_sched.distribution import LengthDistribution, Source

BLIND = LengthDistribution.from_samples([10, 1000], "prior")


def said(length: int, source: Source = "history") -> Forecast:
    return Forecast(LengthDistribution.from_samples([length], source), BLIND)


def told(quality: RollingQuality, right: bool, num: int) -> list[int]:
    """After which of num answers, predicted rightly or wrongly, it changed its mind."""
    lengths = [(10, 1000)[i % 2] for i in range(num)]
    return [
        i
        for i, length in enumerate(lengths)
        if quality.add(said(length if right else 1010 - length), length)
    ]


def test_it_widens_after_500_wrong_ones_and_comes_back_after_500_right_ones() -> None:
    quality = RollingQuality()
    assert told(quality, right=True, num=1_000) == []
    assert told(quality, right=False, num=313) == [312]  # with right ones still in the window
    assert quality.widened
    assert quality.summary()["crps_gain"] < 0
    assert told(quality, right=True, num=1_000) == [WINDOW - 1]
    assert not quality.widened
    assert quality.summary()["crps_gain"] == 1


def test_a_third_of_the_answers_does_not_decide_however_long_it_is() -> None:
    quality = RollingQuality()
    for num_wrong in (0, WINDOW):  # it is not widened, or no longer
        told(quality, right=False, num=num_wrong)
        assert quality.widened is bool(num_wrong)
        for i in range(3 * WINDOW):
            quality.add(*((said(10), 10) if i % 3 else (said(100_000), 1)))
        assert not quality.widened
        assert quality.summary()["crps_gain"] < 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=30))
def test_spearman_is_scipys(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array(pairs, float).T
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert spearman(x, y) == 0
    else:
        assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-9)
