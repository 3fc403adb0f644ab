"""SGLang's priorities on a real server (--enable-priority-scheduling)."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.engine import stage
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill", "fcfs"])
def test_those_of_higher_priority_go_first(classes: SageServer, policy: str) -> None:
    """Under ours, and by SGLang itself."""
    settings(classes, {"schedule_policy": policy})
    asked: dict[str, dict[str, object]] = {
        "low": {"priority": -20},
        "none": {},
        "middle": {"priority": 0},
        "high": {"priority": 20},
    }
    calls = [
        partial(generate, classes, SHORT_PROMPT, 4, rid=rid, **said) for rid, said in asked.items()
    ]
    stage.together(classes, calls)
    assert stage.started(classes) == ["high", "middle", "low", "none"]
    assert classes.stats()["num_policy_errors"] == 0


@pytest.mark.parametrize(
    ("policy", "priority", "num_yields"),
    [("fcfs-fill", 10, 0), ("fcfs-fill", 11, 1), ("sage", 11, 1), ("fcfs", 11, 0)],
)
def test_a_running_request_yields_to_one_of_a_priority_high_enough(
    classes: SageServer, policy: str, priority: int, num_yields: int
) -> None:
    """Under ours with its KV in host memory; SGLang computes it again."""
    settings(classes, {"schedule_policy": policy})
    explained = {"ignore_eos": True, "custom_params": {"explain": True}}
    before = classes.stats()["preemption"]["num_yields"]
    high: list[Future[Any]] = []

    def ask_high(held: dict[str, Any]) -> None:
        assert len(held["running"]) == 3  # all slots
        call = partial(generate, classes, SHORT_PROMPT, 4, rid="high", priority=priority)
        high.append(pool.submit(call))
        stage.once_arrived(classes, 1)

    low = [
        partial(generate, classes, f"{SHORT_PROMPT} {i}", 60, priority=0, sampling_params=explained)
        for i in range(3)
    ]
    with ThreadPoolExecutor(1) as pool:
        answers = stage.together(classes, low, ask_high, tokens=5)
    answers.append(high[0].result())
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [60, 60, 60, 4]
    assert classes.stats()["preemption"]["num_yields"] - before == num_yields
    assert sum(answer["meta_info"]["sage"]["num_yields"] for answer in answers[:3]) == num_yields
