from __future__ import annotations

from predictor_store.predict.quality import WINDOW, Forecast, RollingQuality
from sage_sched.distribution import LengthDistribution


def said(length: int) -> Forecast:
    blind = LengthDistribution.from_samples([10, 1000], "prior")
    return Forecast(LengthDistribution.from_samples([length], "history"), blind)


def test_a_third_of_the_answers_does_not_decide_at_any_length() -> None:
    quality = RollingQuality()
    for num_wrong in (0, WINDOW):  # it is not widened, or no longer
        for _ in range(num_wrong):
            quality.add(said(10), 1000)
        assert quality.widened is bool(num_wrong)
        for i in range(3 * WINDOW):
            quality.add(*((said(10), 10) if i % 3 else (said(100_000), 1)))
        assert not quality.widened
        assert quality.summary()["crps_gain"] < 0
