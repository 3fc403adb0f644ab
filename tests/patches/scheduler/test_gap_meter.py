from __future__ import annotations

from types import SimpleNamespace

import pytest

from patches.scheduler import gap_meter
from tests.patches.schedulers import StandInBatch, make_request


def test_gaps_of_the_last_minute_or_two_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(gap_meter, "time", SimpleNamespace(monotonic=lambda: now_s))
    meter, req = gap_meter.GapMeter(), make_request()
    for seconds, num_tokens, num_gaps, longest_ms in (
        (5.0, 1, None, None),  # a first token has no gap before it
        (2.0, 1, 1, 2000.0),
        (0.06, 2, 3, 2000.0),  # two of a speculative step
        (0.3, 0, 3, 2000.0),  # a chunk of its prompt, say
        *((1.0, 1, None, 2000.0),) * 70,
        *((1.0, 1, None, None),) * 59,
        (1.0, 1, None, 1000.0),  # those of the span before count, and no older ones
    ):
        now_s += seconds
        req.output_ids.extend([1] * num_tokens)
        meter.stepped(StandInBatch([req]), None)
        stayed = meter.stats()["gaps"]["stayed"]
        for name, expected in (("num", num_gaps), ("longest_ms", longest_ms)):
            assert expected is None or stayed[name] == pytest.approx(expected)
