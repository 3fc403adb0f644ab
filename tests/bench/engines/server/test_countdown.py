from __future__ import annotations

from bench.engines.server.countdown import Countdown


def test_what_is_left_is_corrected_by_what_was_taken() -> None:
    now_s = 50.0
    countdown = Countdown([30.0, 60.0, 120.0], now=lambda: now_s)
    assert str(countdown) == "run 1 of 3, about 4 min left"
    now_s += 15.0  # twice as fast as expected
    countdown.next_run()
    assert countdown.left_s() == 90.0
    now_s += 30.0
    countdown.next_run()
    assert str(countdown) == "run 3 of 3, about 60 s left"
