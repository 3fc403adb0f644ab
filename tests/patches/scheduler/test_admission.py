"""SGLang's own admission, as our headroom makes it reserve."""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder

from patches.scheduler.hooks import scheduler_hooks
from sage_sched.app.config import PreemptionConfig, SageConfig
from tests.checks.full_server import stand_in_scheduler
from tests.patches.scheduler.test_state import request

ROOM_TOKENS, CHUNK_TOKENS = 3000, 64


def room_left(policy: str, num_prompt_tokens: int) -> int:
    """After a chunk of a prompt whose answer has a cap of 1000 tokens."""
    config = SageConfig(preemption=PreemptionConfig(enabled=False))
    hooks = {hook.target.rpartition(".")[2]: hook.hook for hook in scheduler_hooks(config)}
    scheduler = stand_in_scheduler(lambda: ROOM_TOKENS, policy)
    scheduler.model_config.is_generation = True
    hooks["init_schedule_policy"](None, scheduler)
    state = scheduler.sage
    req: Any = request([10] * 9, prompt=[1] * num_prompt_tokens)
    state.jobs.arrived(req)
    state.headroom = replace(state.headroom, num_steps=20)
    req.kv.req_pool_idx = 0
    req.prefix_len, req.full_untruncated_fill_ids = 0, array("q", req.origin_input_ids)
    req.retracted_stain, req.extend_len = False, min(num_prompt_tokens, CHUNK_TOKENS)
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    adder = PrefillAdder(1, tree, allocator, scheduler.running_batch, 0.5, 8192, CHUNK_TOKENS)
    goes_on = hooks["add_chunked_req"](PrefillAdder.add_chunked_req, adder, req)
    assert (goes_on is req) is (num_prompt_tokens > CHUNK_TOKENS)
    assert req.sampling_params.max_new_tokens == 1000
    left: int = adder.memory_budget.remaining_total
    return left


@pytest.mark.parametrize(("policy", "answer_tokens"), [("sage", 20), ("fcfs", 1000)])
def test_the_last_chunk_of_a_prompt_reserves_the_headroom_and_not_the_cap(
    policy: str, answer_tokens: int
) -> None:
    assert ROOM_TOKENS - room_left(policy, CHUNK_TOKENS) >= CHUNK_TOKENS + answer_tokens
    assert ROOM_TOKENS - room_left(policy, CHUNK_TOKENS) < CHUNK_TOKENS + answer_tokens + 8
    # An earlier one reserves nothing for the answer.
    assert ROOM_TOKENS - room_left(policy, CHUNK_TOKENS + 1) < CHUNK_TOKENS + 8


def test_an_answer_that_goes_on_to_its_cap_is_reckoned_like_others() -> None:
    """SGLang's other way, by caps, is for these where no prefix is cached."""
    config = SageConfig(preemption=PreemptionConfig(enabled=False))
    scheduler = stand_in_scheduler(lambda: ROOM_TOKENS, "sage")
    scheduler.model_config.is_generation = True
    hooks = {hook.target.rpartition(".")[2]: hook.hook for hook in scheduler_hooks(config)}
    hooks["init_schedule_policy"](None, scheduler)
    req: Any = request([10] * 9)
    req.sampling_params.ignore_eos = True
    scheduler.sage.jobs.arrived(req)

    def original(adder: Any, req: Any) -> bool:
        return bool(req.sampling_params.ignore_eos)

    adder: Any = SimpleNamespace(can_run_list=[])
    assert not hooks["add_one_req"](original, adder, req)
    assert req.sampling_params.ignore_eos
