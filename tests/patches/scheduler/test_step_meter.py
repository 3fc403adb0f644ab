from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patches.scheduler.step_meter import StepMeter, tokens_of
from sage_sched.step_learner import COLUMNS


def batch(
    mode: str = "decode", *, kv: list[int], new: list[int] | None = None, mixed: int = 0
) -> Any:
    """Make the parts of a ScheduleBatch that the meter reads. new: each request's tokens to prefill
    after `kv` cached ones. The last `mixed` requests decode."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(
            is_extend_without_speculative=lambda: new is not None,
            is_mixed=lambda: mixed > 0,
            is_idle=lambda: mode == "idle",
            is_prebuilt=lambda: mode == "prebuilt",
        ),
        reqs=[SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n)) for n in kv],
        prefix_lens=kv,
        extend_lens=new,
        decoding_reqs=[object()] * mixed,
        extend_num_tokens=sum(new or [7]),  # a decoding batch keeps its prefill's
    )


class Told:
    """A meter with the test's clock, and the steps that it reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.steps: list[tuple[list[float], float]] = []
        monkeypatch.setattr(
            "patches.scheduler.step_meter.time", SimpleNamespace(perf_counter=lambda: self.now_s)
        )
        self.meter = StepMeter(lambda work, seconds: self.steps.append(([*work], seconds)), "cpu")

    @property
    def seconds(self) -> list[float]:
        return [seconds for _, seconds in self.steps]

    def launch(self, one: Any, after_idle: bool = False) -> Any:
        return self.meter.launched(one, after_idle=after_idle)

    def end(self, work: Any, after_s: float, num_tokens: float = 1.0) -> None:
        self.now_s += after_s
        self.meter.ended(work, num_tokens=num_tokens)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_what_a_step_has_to_do(told: Told) -> None:
    works = [
        told.launch(batch(kv=[5, 17])),
        told.launch(batch(kv=[0, 10], new=[4, 6])),
        told.launch(batch(kv=[0, 20, 30], new=[4, 1, 1], mixed=2)),
        # SGLang runs a decode step like a prefill if a peer prefills.
        told.launch(batch(kv=[5, 17], new=[1, 1], mixed=2)),
    ]
    decode = {"decode_steps": 1, "decode_requests": 2, "decode_kv_tokens": 22}
    assert [{name: n for name, n in zip(COLUMNS, work, strict=True) if n} for work in works] == [
        decode,
        {"prefill_steps": 1, "prefill_requests": 2, "prefill_tokens": 10,
         "prefill_pairs": 4 * 2 + 6 * 13},
        {"prefill_steps": 1, "prefill_requests": 1, "prefill_tokens": 4, "prefill_pairs": 8,
         "decode_requests": 2, "decode_kv_tokens": 50},
        decode,
    ]  # fmt: skip


def test_a_step_takes_from_the_end_of_the_one_before_to_its_own(told: Told) -> None:
    first = told.launch(batch(kv=[1]), after_idle=True)
    told.now_s += 1.0
    second = told.launch(batch(kv=[2]))  # under overlap, before the first is over
    told.end(first, 2.0)
    third = told.launch(batch(kv=[3]))
    told.end(second, 4.0)
    told.end(third, 8.0)
    assert told.steps == [(first, 3.0), (second, 4.0), (third, 8.0)]


def test_what_was_idle_is_no_steps_time(told: Told) -> None:
    told.end(told.launch(batch(kv=[1]), after_idle=True), 1.0)
    told.now_s += 1000.0
    told.end(told.launch(batch(kv=[1]), after_idle=True), 2.0)
    assert told.seconds == [1.0, 2.0]


def test_a_step_that_something_came_into_is_not_told_of(told: Told) -> None:
    told.end(told.launch(batch(kv=[1]), after_idle=True), 1.0)
    told.meter.interrupted()
    told.end(told.launch(batch(kv=[1])), 1000.0)
    told.end(told.launch(batch(kv=[1])), 2.0)
    assert told.seconds == [1.0, 2.0]


@pytest.mark.parametrize("mode", ["idle", "prebuilt"])
def test_what_is_no_step_is_not_told_of(told: Told, mode: str) -> None:
    told.end(told.launch(batch(kv=[1]), after_idle=True), 1.0)
    told.end(told.launch(batch(mode, kv=[])), 5.0)
    told.end(told.launch(batch(kv=[1])), 2.0)
    assert told.seconds == [1.0, 2.0]


def test_a_speculative_step_counts_as_a_step_a_token(told: Told) -> None:
    result = SimpleNamespace(accept_lens=torch.tensor([1, 4]))
    told.end(told.launch(batch(kv=[5, 17]), after_idle=True), 3.0, tokens_of(result))
    told.end(told.launch(batch(kv=[0], new=[4])), 1.0, tokens_of(result))
    assert [dict(zip(COLUMNS, work, strict=True)) for work, _ in told.steps] == [
        dict.fromkeys(COLUMNS, 0)
        | {"decode_steps": 2.5, "decode_requests": 5.0, "decode_kv_tokens": 55.0},
        dict.fromkeys(COLUMNS, 0)
        | {"prefill_steps": 1, "prefill_requests": 1, "prefill_tokens": 4, "prefill_pairs": 8},
    ]
    assert tokens_of(SimpleNamespace(accept_lens=None)) == tokens_of(object()) == 1.0
