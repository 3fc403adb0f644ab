from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from tests.patches.schedulers import Server, make_request

ROOM_TOKENS, CHUNK_TOKENS = 3000, 64


def reserved_tokens(policy: str, prompt_tokens: int) -> int:
    """Tokens that SGLang reserves after a chunk of a prompt; its answer has a cap of 1000."""
    server = Server(schedule_policy=policy, free_tokens=ROOM_TOKENS)
    (req,) = server.arrive(make_request([10] * 9, prompt_tokens))
    kept_tokens = 30 if policy == "sage" else 0
    server.state.headroom = replace(server.state.headroom, num_steps=20, kept_tokens=30)
    req.kv.req_pool_idx = 0
    req.prefix_len, req.full_untruncated_fill_ids = 0, array("q", req.origin_input_ids)
    req.extend_end = min(prompt_tokens, CHUNK_TOKENS)
    scheduler = server.scheduler
    memory = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    adder = PrefillAdder(1, *memory, scheduler.running_batch, 0.5, 8192, CHUNK_TOKENS)
    server.hooks["__init__"](None, adder)
    goes_on = server.hooks["add_chunked_req"](PrefillAdder.add_chunked_req, adder, req)
    assert (goes_on is req) is (prompt_tokens > CHUNK_TOKENS)
    assert req.sampling_params.max_new_tokens == 1000
    return ROOM_TOKENS - int(adder.memory_budget.remaining_total) - kept_tokens


@pytest.mark.parametrize(("policy", "answer_tokens"), [("sage", 20), ("fcfs", 1000)])
def test_the_last_chunk_reserves_headroom(policy: str, answer_tokens: int) -> None:
    last_tokens = reserved_tokens(policy, CHUNK_TOKENS) - CHUNK_TOKENS
    assert answer_tokens <= last_tokens < answer_tokens + 8
    # An earlier chunk reserves nothing for the answer.
    assert reserved_tokens(policy, CHUNK_TOKENS + 1) < CHUNK_TOKENS + 8


def test_an_answer_that_ignores_eos_is_admitted_like_others(server: Server) -> None:
    # SGLang's other way, by caps, is for these if no prefix is cached.
    (req,) = server.arrive(make_request([10] * 9, ignore_eos=True))
    adder = SimpleNamespace(can_run_list=[])
    add = server.hooks["add_one_req"]
    assert not add(lambda adder, req: req.sampling_params.ignore_eos, adder, req)
    assert req.sampling_params.ignore_eos


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
