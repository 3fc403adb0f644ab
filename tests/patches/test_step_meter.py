from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.step_meter import COLUMNS, STEPS_PER_WINDOW, StepMeter
from sage_sched.step_time import StepTime


def batch(*, kv: list[int], new: list[int] | None = None) -> Any:
    """What the meter reads of a ScheduleBatch; new: a prefill's tokens after kv cached ones."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: new is not None),
        reqs=[SimpleNamespace(kv=SimpleNamespace(kv_committed_len=n)) for n in kv],
        prefix_lens=kv,
        extend_lens=new,
        extend_num_tokens=sum(new or [7]),  # a decoding batch keeps its prefill's
    )


def test_a_window_adds_up_the_work_of_its_steps() -> None:
    meter = StepMeter()
    steps = [batch(kv=[0, 10], new=[4, 6]), *[batch(kv=[5, 17])] * STEPS_PER_WINDOW]
    for i, step in enumerate(steps):
        meter.launched(step, after_idle=i == 0)
    (window,) = meter.windows()
    found = dict(zip(COLUMNS, window, strict=True))
    assert found.pop("seconds") > 0
    decodes = STEPS_PER_WINDOW - 1
    assert found == {
        "prefill_steps": 1,
        "prefill_requests": 2,
        "prefill_tokens": 10,
        "prefill_pairs": 4 * 2 + 6 * 13,
        "decode_steps": decodes,
        "decode_requests": 2 * decodes,
        "decode_kv_tokens": 22 * decodes,
    }


def test_the_pace_is_how_many_of_the_models_seconds_go_by_in_one() -> None:
    meter = StepMeter()
    decode_s = StepTime(0, 0, 0, 0, decode_base_s=1.0, decode_request_s=0, decode_kv_token_s=0.5)
    assert meter.pace(decode_s) == 1  # nothing is known yet
    for _ in range(2 * STEPS_PER_WINDOW + 1):
        meter.launched(batch(kv=[1, 3]), after_idle=False)
    took_s = sum(window[-1] for window in meter.windows())
    assert meter.pace(decode_s) == pytest.approx(2 * STEPS_PER_WINDOW * 3 / took_s)


def test_what_was_idle_is_no_steps_time() -> None:
    meter = StepMeter()
    for i in range(5 * STEPS_PER_WINDOW):
        meter.launched(batch(kv=[5]), after_idle=i % STEPS_PER_WINDOW == 0)
    assert meter.windows() == []
