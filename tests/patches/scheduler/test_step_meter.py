from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from patches.scheduler.step_meter import StepMeter, tokens_of
from sage_sched.step_learner import COLUMNS
from tests.patches.fake_device import FakeDevice


def batch(*kv: int, new: list[int] | None = None, mixed: int = 0) -> Any:
    """Make the parts of a ScheduleBatch that the meter reads. new: each request's tokens to prefill
    after `kv` cached ones. The last `mixed` requests decode."""
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE if new is None else ForwardMode.MIXED,
        reqs=[SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n)) for n in kv],
        prefix_lens=[*kv],
        extend_lens=new,
        decoding_reqs=[object()] * mixed,
    )


def works(*steps: tuple[Any, float]) -> list[dict[str, float]]:
    """Return the reported work of batches whose requests get this many tokens each."""
    reported: list[list[float]] = []
    meter = StepMeter(lambda work, seconds: reported.append([*work]), "cpu")
    for one, num_tokens in steps:
        meter.ended(meter.launched(one, after_idle=True), num_tokens)
    rows = (zip(COLUMNS, work, strict=True) for work in reported)
    return [{name: number for name, number in row if number} for row in rows]


def test_work_of_a_step() -> None:
    # SGLang runs a decode step like a prefill if a peer prefills.
    decode = {"decode_steps": 1, "decode_requests": 2, "decode_kv_tokens": 22}
    assert works((batch(5, 17, new=[1, 1], mixed=2), 1.0)) == [decode]


def test_a_speculative_step_counts_as_a_step_a_token() -> None:
    steps = ((batch(5, 17), [1, 4]), (batch(0, new=[4]), [9]), (batch(5), [1]))
    accepted = [SimpleNamespace(accept_lens=torch.tensor(numbers)) for _, numbers in steps]
    found = works(*((one, tokens_of(each)) for (one, _), each in zip(steps, accepted, strict=True)))
    assert found == [
        {"decode_steps": 2.5, "decode_requests": 5.0, "decode_kv_tokens": 55.0},
        {"prefill_steps": 1, "prefill_requests": 1, "prefill_tokens": 4, "prefill_pairs": 8},
        {"decode_steps": 1.75, "decode_requests": 1.75, "decode_kv_tokens": 1.75 * 5},
    ]
    assert tokens_of(SimpleNamespace(accept_lens=None)) == tokens_of(object()) == 1.0


@pytest.mark.parametrize("most_tokens", [1, 3])
def test_the_kv_of_a_step_is_that_of_its_requests(most_tokens: int) -> None:
    script, meter = random.Random(most_tokens), StepMeter(lambda work, seconds: None, "cpu")
    reqs: list[Any] = []
    for _ in range(200):
        if script.random() < 0.2:
            reqs += batch(script.randint(1, 900)).reqs
        if reqs and script.random() < 0.1:
            reqs.pop(script.randrange(len(reqs)))
        one = batch()
        one.reqs = [*reqs]
        work = meter.launched(one, after_idle=True)
        assert work is not None
        assert work[-1] == sum(req.kv.kv_committed_len for req in reqs)
        numbers = [script.randint(1, most_tokens) for _ in reqs] or [1]
        for req, number in zip(reqs, numbers, strict=False):
            req.kv.kv_committed_len += number
        meter.ended(work, sum(numbers) / len(numbers))


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_device_times_a_step_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    device, reported = FakeDevice(), list[float]()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    meter = StepMeter(lambda work, seconds: reported.append(seconds), "cuda")
    forward = device.Stream() if overlaps else device.current_stream()
    scheduler: Any = SimpleNamespace(forward_stream=forward, enable_overlap=overlaps)
    # The first step follows idle time, the fourth one a move of KV.
    for number, milliseconds in enumerate((7.0, 5.0, 4.0, 90.0, 6.0)):
        scheduler._sched_idled = number == 0
        if number == 3:
            meter.interrupted()
        result = SimpleNamespace(accept_lens=None)

        def run(result: Any = result, milliseconds: float = milliseconds) -> Any:
            device.works_for(forward, milliseconds)
            return result

        meter.timed(scheduler, batch(5, 17), run)
        if number == 2:
            device.work()
        meter.processed(result)  # the host is late, or sees the result before the event
    assert reported == [0.005, 0.004]
    device.work()
    meter.processed(meter.timed(scheduler, batch(5, 17), lambda: SimpleNamespace()))
    assert reported == [0.005, 0.004, 0.006]
    assert device.num_syncs == 0
