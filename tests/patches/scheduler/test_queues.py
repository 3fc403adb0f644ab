from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from patches.scheduler.queues import Room


def test_those_whose_turn_it_is_not_need_more_than_there_is() -> None:
    one: Any = SimpleNamespace()
    other: Any = SimpleNamespace()
    room = Room()
    assert room.needed_tokens(one, 5, 100) == 5
    room.open_to([other])
    assert room.needed_tokens(one, 5, 100) > 100
    assert room.refused is None
    assert room.needed_tokens(other, 5, 100) == 5
    assert room.refused is other
    room.go_by_sglang()
    assert room.needed_tokens(one, 5, 100) == 5
