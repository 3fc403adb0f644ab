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
    those_of_higher_priority_go_first(classes, policy)


def those_of_higher_priority_go_first(server: SageServer, policy: str) -> None:
    settings(server, {"schedule_policy": policy})
    asked: dict[str, dict[str, object]] = {
        "low": {"priority": -20},
        "none": {},
        "middle": {"priority": 0},
        "high": {"priority": 20},
    }
    calls = [
        partial(generate, server, SHORT_PROMPT, 4, rid=rid, **said) for rid, said in asked.items()
    ]
    stage.together(server, calls)
    assert stage.started(server) == ["high", "middle", "low", "none"]
    assert server.stats()["num_policy_errors"] == 0


@pytest.mark.parametrize(
    ("policy", "priority", "num_preemptions"),
    [("fcfs-fill", 10, 0), ("fcfs-fill", 11, 1), ("sage", 11, 1), ("fcfs", 11, 0)],
)
def test_a_running_request_yields_to_one_of_a_priority_high_enough(
    classes: SageServer, policy: str, priority: int, num_preemptions: int
) -> None:
    """Under ours with its KV in host memory; SGLang computes it again."""
    settings(classes, {"schedule_policy": policy})
    assert num_yielding_to(classes, priority, num_slots=3) == num_preemptions


def test_two_ranks_decide_alike(two_ranks: SageServer) -> None:
    """Or SGLang's check of what ranks agree on ends them."""
    those_of_higher_priority_go_first(two_ranks, "sage")
    assert num_yielding_to(two_ranks, 10, num_slots=6) == 0
    assert num_yielding_to(two_ranks, 11, num_slots=6) == 1


def num_yielding_to(server: SageServer, priority: int, num_slots: int) -> int:
    """The number of running requests preempted for a request of this priority."""
    before = server.stats()["preemption"]["num_preemptions"]
    high: list[Future[Any]] = []

    def ask_high(held: dict[str, Any]) -> None:
        assert len(held["running"]) == num_slots
        call = partial(generate, server, SHORT_PROMPT, 4, rid="high", priority=priority)
        high.append(pool.submit(call))
        stage.once_arrived(server, 1)

    more: dict[str, Any] = {"priority": 0, "sampling_params": {"ignore_eos": True}}
    low = [partial(generate, server, f"{SHORT_PROMPT} {i}", 60, **more) for i in range(num_slots)]
    with ThreadPoolExecutor(1) as pool:
        answers = stage.together(server, low, ask_high, tokens=5)
    answers.append(high[0].result())
    lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert lengths == [*[60] * num_slots, 4]
    return int(server.stats()["preemption"]["num_preemptions"] - before)
