from __future__ import annotations

from array import array
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.scheduler.queues import Room
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


@pytest.mark.parametrize(("mixes", "expected"), [(False, 4096), (True, 4095)])
def test_a_chunk_is_no_larger_than_a_prefill_may_be(mixes: bool, expected: int) -> None:
    server = Server(chunked_prefill_size=8192, max_prefill_tokens=4096, is_mixed_chunk=mixes)
    batch = StandInBatch(server.arrive(make_request([9])))
    assert server.state.view(batch).pass_tokens == expected


def test_on_a_decode_server_only_the_admitted_get_room() -> None:
    one, other, room = make_request([9]), make_request([9]), Room()
    assert room.needed_tokens(one, 5, 100) == 5
    room.open_to([other])
    for req, needs, refused in ((one, 200, None), (other, 5, other), (one, 200, other)):
        assert (room.needed_tokens(req, 5, 100), room.refused) == (needs, refused)
    room.open_to_all()
    assert (room.refused, room.needed_tokens(one, 5, 100)) == (None, 5)
