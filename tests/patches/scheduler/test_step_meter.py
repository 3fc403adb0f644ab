from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from patches.scheduler.step_meter import StepMeter, tokens_of
from sage_sched.step_learner import COLUMNS


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
    """Return what is reported of batches whose requests get this many tokens each."""
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
