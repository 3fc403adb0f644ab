"""What is taken in between two slices of a prefill, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)

from patches.slices import _can_be_cut, _new_requests, why_not_cut
from sage_sched.policies.qllm import Qllm, QllmParameters
from tests.sage_sched.strategies import SERVER


def generate(rid: str, mm_inputs: object = None) -> Any:
    """What _new_requests reads of one; SGLang's has a hundred fields."""
    about = {"rid": rid, "mm_inputs": mm_inputs, "positional_embed_overrides": None}
    return Mock(spec=TokenizedGenerateReqInput, **about)


def test_requests_pass_one_another_and_aborts_but_nothing_that_changes_the_server() -> None:
    first, second, third = (generate(rid) for rid in "134")
    image = generate("2", mm_inputs=object())
    health = generate(HEALTH_CHECK_RID_PREFIX)
    inbox = [first, AbortReq(rid="0"), image, health, second, FlushCacheReqInput(), third]
    assert [one.rid for one in _new_requests(inbox)] == ["1", "3"]


@pytest.mark.parametrize("barrier", [AbortReq(abort_all=True), PauseGenerationReqInput()])
def test_they_wait_behind_what_concerns_all(barrier: Any) -> None:
    assert _new_requests([barrier, generate("1")]) == []


def test_only_prefills_that_slices_compute_alike_are_cut() -> None:
    plain = {
        "input_embeds": None,
        "multimodal_inputs": None,
        "beam_group": None,
        "return_routed_experts": False,
        "return_indexer_topk": False,
    }

    def batch(req: dict[str, Any], **fields: Any) -> Any:
        whole = {"is_prefill_only": False, "return_hidden_states": False} | fields
        return SimpleNamespace(reqs=[SimpleNamespace(**plain | req)], **whole)

    assert _can_be_cut(batch({}))
    assert not _can_be_cut(batch({}, is_prefill_only=True))
    assert not _can_be_cut(batch({}, return_hidden_states=True))
    for name in plain:
        assert not _can_be_cut(batch({name: object()}))


def test_a_server_that_was_started_without_slices_cannot_be_switched_to_them() -> None:
    cutting, whole = (Qllm(QllmParameters(slice_ms=ms), SERVER) for ms in (50.0, 0.0))
    assert "started without" in why_not_cut(cutting, None)
    assert why_not_cut(whole, None) == ""
    slices: Any = object()
    assert why_not_cut(cutting, slices) == ""
