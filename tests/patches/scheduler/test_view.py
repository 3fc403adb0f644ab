from __future__ import annotations

from array import array
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.scheduler.view import common_length
from tests.patches.schedulers import Server, StandInBatch, make_request

prompts = st.lists(st.integers(0, 2), max_size=40)


@given(prompts, prompts, prompts)
def test_the_common_prefix_is_found(prefix: list[int], one: list[int], two: list[int]) -> None:
    one, two = prefix * 3 + one, prefix * 3 + two
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    assert common_length(array("q", one), array("q", two)) == len([*alike])


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        ({}, 40), ({"extra_key": "adapter"}, 0), ({"cache_salt": "salt"}, 0),
        ({"input_embeds": [[0.0]]}, 0), ({"origin_input_ids": array("q", [2] * 50)}, 0),
    ],
)  # fmt: skip
def test_prefixes_are_shared(server: Server, difference: dict[str, Any], expected: int) -> None:
    _, two = server.queue(make_request([9], [1] * 40), make_request([9], [1] * 50))
    vars(two).update(difference)
    view = server.state.view(StandInBatch([two]))
    assert view.common_tokens(0, 1) == view.common_tokens(0, two.sage.job) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [True, False, False]),  # also where no request can leave the device
        ({"enable_lora": False}, [True, True, True]),
        ({"enable_lora_overlap_loading": True}, [True, False, False]),
        ({"lora_drainer": "SGLang's"}, [True, True, True]),
    ],
)
def test_adapters_find_room_beside_others(flags: dict[str, Any], expected: list[bool]) -> None:
    def fits(adapters: set[str]) -> bool:
        return len(adapters) <= 1

    def asked(req: Any, running: set[str]) -> bool:
        assert not scheduler.enable_lora_overlap_loading, "this would load the adapter"
        return fits({req.lora_id, *running})

    manager = SimpleNamespace(validate_lora_batch=fits)
    server = Server(
        enable_lora_overlap_loading=False,
        lora_drainer=None,
        can_schedule_lora_req=asked,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager)),
    )
    scheduler = server.scheduler
    vars(scheduler).update({"enable_lora": True, **flags})
    waiting = [make_request([9]) for _ in "abc"]
    for req, req.lora_id in zip(waiting, "abc", strict=True):
        server.arrive(req)
    scheduler.waiting_queue = waiting
    view = server.state.view(StandInBatch(waiting[:1]))
    assert [*map(view.has_adapter, range(3))] == expected
    # While none runs there is room for any one of them, but not for two.
    view = server.state.view(StandInBatch())
    assert [*map(view.has_adapter, range(3))] == [True, True, True]
    assert [*map(view.adapters_in_order(), range(3))] == expected
