"""How far two prompts are alike, and whose adapters find room."""

from __future__ import annotations

from array import array
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.scheduler.view import _adapters, common_length

prompts = st.lists(st.integers(0, 2), max_size=40)


@given(prompts, prompts, prompts)
def test_the_common_length_is_that_of_the_longest_common_beginning(
    beginning: list[int], one: list[int], two: list[int]
) -> None:
    one, two = beginning * 3 + one, beginning * 3 + two
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    assert common_length(array("q", one), array("q", two)) == len([*alike])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [True, False, False]),  # also where no request can leave the device
        ({"enable_lora": False}, [True, True, True]),
        ({"enable_lora_overlap_loading": True}, [True, False, False]),
        ({"lora_drainer": "SGLang's"}, [True, True, True]),
    ],
)
def test_an_adapter_finds_room_beside_those_that_run(
    flags: dict[str, Any], expected: list[bool]
) -> None:
    def asked(req: Any, running: set[str]) -> bool:
        assert not scheduler.enable_lora_overlap_loading, "this would load the adapter"
        return fits({req.lora_id, *running})

    def fits(adapters: set[str]) -> bool:
        return len(adapters) <= 1

    scheduler: Any = SimpleNamespace(
        sage=SimpleNamespace(preemption=None),
        enable_lora=True,
        enable_lora_overlap_loading=False,
        lora_drainer=None,
        can_schedule_lora_req=asked,
        tp_worker=SimpleNamespace(
            model_runner=SimpleNamespace(lora_manager=SimpleNamespace(validate_lora_batch=fits))
        ),
    )
    vars(scheduler).update(flags)
    waiting: Any = [SimpleNamespace(lora_id=name) for name in "abc"]
    has_adapter = _adapters(scheduler, waiting, waiting[:1])
    assert [has_adapter(position) for position in range(3)] == expected
    # While none runs there is room for any one of them, but not for two.
    has_adapter = _adapters(scheduler, waiting, [])
    assert all(has_adapter(position) for position in range(3))
    has_adapter = _adapters(scheduler, waiting, [], in_order=True)
    assert [has_adapter(position) for position in range(3)] == expected
