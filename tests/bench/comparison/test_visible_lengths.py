from __future__ import annotations

from bench.comparison.visible_lengths import visible
from bench.engines.simulator.request import SimRequest


def test_a_visible_length_is_the_cap_and_nothing_else_changes() -> None:
    (shown,) = visible([SimRequest(1.0, 20, 7, 4096, None, "chat")])
    assert shown == SimRequest(1.0, 20, 7, 7, None, "chat")
