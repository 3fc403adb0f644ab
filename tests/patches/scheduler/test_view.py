from __future__ import annotations

from array import array
from itertools import takewhile
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
    one, two = server.queue(make_request([9], [1] * 40), make_request([9], [1] * 50))
    vars(two).update(difference)
    for batch in ((), (two,)):  # it waits, or it runs
        kv = server.state.view(StandInBatch([*batch])).kv
        assert kv.common_tokens(one.sage.job, two.sage.job) == expected


def test_sglang_drains_adapters_by_each_ranks_own_clock(server: Server) -> None:
    vars(server.scheduler).update({"enable_lora": True, "lora_drainer": "SGLang's"})
    server.queue(make_request([9]))
    assert server.state.view(StandInBatch()).kv.fits_adapters(["one", "two"])  # it is not asked
