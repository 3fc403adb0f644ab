from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from tests.patches.schedulers import Server, make_request


def test_prompts_of_both_kinds_do_not_share_a_prefill(server: Server) -> None:
    of_ids, of_embeds = server.arrive(make_request([10] * 9), make_request([10] * 9))
    of_embeds.input_embeds = [[0.0]]
    adder = SimpleNamespace(can_run_list=[of_ids])
    add = server.hooks["add_one_req"]
    assert add(pytest.fail, adder, of_embeds) is AddReqResult.OTHER


@pytest.mark.parametrize(
    ("policy", "has_chunked", "is_chunked", "admitted"),
    [
        ("sage", True, True, False), ("sage", True, False, True), ("sage", False, True, True),
        ("fcfs", True, True, True),
    ],
)  # fmt: skip
def test_one_prompt_is_chunked_at_a_time(
    policy: str, has_chunked: bool, is_chunked: bool, admitted: bool
) -> None:
    select = Server(schedule_policy=policy).hooks["_select_prefill_admission"]
    found = SimpleNamespace(is_chunked=is_chunked)
    got = select(lambda *args, **kw: found, object(), object(), has_chunked_req=has_chunked)
    assert got is (found if admitted else AddReqResult.OTHER)
