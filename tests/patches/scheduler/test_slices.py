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
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from patches.scheduler import slices
from patches.scheduler.admission import correct
from patches.scheduler.slices import Slices, _can_be_cut, _new_requests, why_not_cut
from sage_sched.best_effort import Qllm, QllmParameters
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


class Bench:
    """A scheduler of five layers that nobody else has anything to do with, and what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[object] = []
        self.enable_pdmux = False
        self.processed_tokens_counter = 0
        self.device = "cpu"
        self.model_config = SimpleNamespace(num_hidden_layers=5)
        backend = SimpleNamespace(init_forward_metadata=self.done.append)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
        monkeypatch.setattr(slices, "settle", lambda *args: self.done.append("settled"))
        self.batch: Any = SimpleNamespace(
            reqs=["req"], forward_mode=ForwardMode.EXTEND, extend_num_tokens=7, input_ids="ids"
        )
        self.batch.split_forward_batch = SimpleNamespace(input_ids="ids")

    def launch(self, batch: Any) -> str:
        assert batch.input_ids == "ids"
        assert self.enable_pdmux
        assert batch.forward_mode == ForwardMode.SPLIT_PREFILL
        self.done.append((batch.split_index, batch.split_forward_count))
        self.processed_tokens_counter += batch.extend_num_tokens  # as Scheduler.run_batch
        batch.input_ids = None
        return f"slice {batch.split_index}"


def test_each_slice_has_ended_before_others_run_and_finds_attention_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench: Any = Bench(monkeypatch)
    cutting = Slices(bench)
    state = bench.batch.split_forward_batch

    def others(self: Slices) -> None:
        assert self.parked == ["req"]
        assert not bench.enable_pdmux
        assert bench.batch.forward_mode == ForwardMode.EXTEND
        bench.done.append("others")

    monkeypatch.setattr(Slices, "_give_way", others)
    result = cutting.run(bench.batch, 2, bench.launch, lambda: bench.done.append("cut"))
    between = ["settled", "cut", "others", state]
    assert bench.done == [(0, 2), *between, (2, 2), *between, (4, 1)]
    assert result == "slice 4"
    assert cutting.parked == []
    assert cutting.stats() == {"num_prefills": 1, "num_cuts": 2, "num_passed": 0}
    assert bench.batch.forward_mode == ForwardMode.EXTEND
    assert bench.processed_tokens_counter == 7


@pytest.mark.parametrize("is_stock", [True, False])
def test_admission_counts_on_the_answers_of_those_who_are_parked(is_stock: bool) -> None:
    def adder() -> Any:
        return SimpleNamespace(
            running_batch=SimpleNamespace(reqs=["runs"]),
            new_token_ratio=0.5,
            page_size=1,
            memory_budget=SimpleNamespace(total_offset=10.0),
            _get_running_request_total_token_offset=lambda req: 10.0,
        )

    def offset(parked: list[str]) -> float:
        state: Any = SimpleNamespace(
            settings=SimpleNamespace(is_stock=is_stock),
            headroom=SimpleNamespace(set_aside_tokens=lambda jobs: [20] * len(jobs)),
            slices=SimpleNamespace(parked=parked),
            jobs=SimpleNamespace(running=lambda reqs: reqs),
        )
        correct(state, one := adder())
        found: float = one.memory_budget.total_offset
        return found

    assert offset(["parked", "parked too"]) == offset([]) + (20.0 if is_stock else 40.0)
