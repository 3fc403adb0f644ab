from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from patches.scheduler.step_meter import StepMeter, tokens_of
from sage_sched.step_learner import COLUMNS


def batch(
    *kv: int, new: list[int] | None = None, mixed: int = 0, mode: ForwardMode = ForwardMode.DECODE
) -> Any:
    """Make the parts of a ScheduleBatch that the meter reads. new: each request's tokens to prefill
    after `kv` cached ones. The last `mixed` requests decode."""
    return SimpleNamespace(
        forward_mode=mode if new is None else ForwardMode.MIXED if mixed else ForwardMode.EXTEND,
        reqs=[SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n)) for n in kv],
        prefix_lens=[*kv],
        extend_lens=new,
        decoding_reqs=[object()] * mixed,
    )


class Told:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
        self.now_s = 100.0
        self.steps: list[tuple[list[float], float]] = []
        monkeypatch.setattr(
            "patches.scheduler.step_meter.time", SimpleNamespace(perf_counter=lambda: self.now_s)
        )
        self.meter = StepMeter(lambda work, seconds: self.steps.append(([*work], seconds)), device)

    def works(self) -> list[dict[str, float]]:
        rows = (zip(COLUMNS, work, strict=True) for work, _ in self.steps)
        return [{name: number for name, number in row if number} for row in rows]

    def step(
        self, one: Any, seconds: float, *, after_idle: bool = False, num_tokens: float = 1.0
    ) -> None:
        work = self.meter.launched(one, after_idle=after_idle)
        self.now_s += seconds
        self.meter.ended(work, num_tokens=num_tokens)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def test_what_a_step_has_to_do(told: Told) -> None:
    for one in (
        batch(5, 17),
        batch(0, 10, new=[4, 6]),
        batch(0, 20, 30, new=[4, 1, 1], mixed=2),
        # SGLang runs a decode step like a prefill if a peer prefills.
        batch(5, 17, new=[1, 1], mixed=2),
    ):
        told.step(one, 1.0, after_idle=True)
    decode = {"decode_steps": 1, "decode_requests": 2, "decode_kv_tokens": 22}
    assert told.works() == [
        decode,
        {"prefill_steps": 1, "prefill_requests": 2, "prefill_tokens": 10,
         "prefill_pairs": 4 * 2 + 6 * 13},
        {"prefill_steps": 1, "prefill_requests": 1, "prefill_tokens": 4, "prefill_pairs": 8,
         "decode_requests": 2, "decode_kv_tokens": 50},
        decode,
    ]  # fmt: skip


def test_a_step_takes_from_the_end_of_the_one_before_to_its_own(told: Told) -> None:
    meter = told.meter
    first = meter.launched(batch(1), after_idle=True)
    told.now_s += 1.0
    second = meter.launched(batch(2), after_idle=False)  # under overlap, before the first is over
    for work, seconds in ((first, 2.0), (second, 4.0)):
        told.now_s += seconds
        meter.ended(work)
    assert told.steps == [(first, 3.0), (second, 4.0)]


@pytest.mark.parametrize(
    "disturb",
    [
        lambda told: told.step(batch(mode=ForwardMode.IDLE), 5.0),
        lambda told: told.step(batch(mode=ForwardMode.PREBUILT), 5.0),
        lambda told: (told.meter.interrupted(), told.step(batch(1), 1000.0)),
    ],
)
def test_what_is_no_step_or_was_interrupted_is_not_told_of(
    told: Told, disturb: Callable[[Told], None]
) -> None:
    told.step(batch(1), 1.0, after_idle=True)
    disturb(told)
    told.step(batch(1), 2.0)
    told.now_s += 1000.0
    told.step(batch(1), 3.0, after_idle=True)
    assert [seconds for _, seconds in told.steps] == [1.0, 2.0, 3.0]


def test_a_speculative_step_counts_as_a_step_a_token(told: Told) -> None:
    for one, accepted in ((batch(5, 17), [1, 4]), (batch(0, new=[4]), [9]), (batch(5), [1])):
        result = SimpleNamespace(accept_lens=torch.tensor(accepted))
        told.step(one, 3.0, after_idle=True, num_tokens=tokens_of(result))
    assert told.works() == [
        {"decode_steps": 2.5, "decode_requests": 5.0, "decode_kv_tokens": 55.0},
        {"prefill_steps": 1, "prefill_requests": 1, "prefill_tokens": 4, "prefill_pairs": 8},
        {"decode_steps": 1.75, "decode_requests": 1.75, "decode_kv_tokens": 1.75 * 5},
    ]
    assert tokens_of(SimpleNamespace(accept_lens=None)) == tokens_of(object()) == 1.0


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 2.0), ("cuda", 5.0)])
def test_a_step_of_an_accelerator_ends_with_its_result(
    device: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(monkeypatch, device)

    def run() -> Any:
        told.now_s += 2.0
        return SimpleNamespace(accept_lens=None)

    result = told.meter.timed(SimpleNamespace(_sched_idled=True), batch(1), run)
    told.now_s += 3.0
    told.meter.processed(result)
    assert [found for _, found in told.steps] == [seconds]
