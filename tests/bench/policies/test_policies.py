"""Policies by name and setting, and routers by their definitions."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.policies.cluster_view import ClusterView
from bench.policies.rival import Rival, by_arrival
from bench.policies.routers import ROUTERS, router_named
from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.run import make_node
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("@clip=3", "names no policy"),
        ("fcfs@", "the setting ''"),
        ("fcfs@boldness=1", "'boldness', allowed: NAME@conservativeness=...,clip=..."),
        ("fcfs@clip=0", "clip is '0'"),
        ("fcfs@clip=1.5", "clip is '1.5', allowed: a whole number"),
        ("fcfs@conservativeness=-1", "conservativeness is '-1'"),
        ("fcfs@conservativeness=nan", "conservativeness is 'nan'"),
        ("fcfs@clip=3,clip=4", "sets clip twice"),
        ("sage@clip=3", "which sage replaces"),
    ],
)
def test_unknown_policies_fail(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Rival.parse(spec)


@pytest.mark.parametrize("conservativeness", [0.0, 0.1, 1.0, 2.0])
def test_the_new_token_ratio_is_sglangs(
    conservativeness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = pytest.importorskip(
        "sglang.srt.managers.scheduler_components.new_token_ratio_tracker"
    )
    schedule = SimpleNamespace(schedule_conservativeness=conservativeness)
    monkeypatch.setattr(trackers, "get_schedule", lambda: schedule)
    theirs = trackers.NewTokenRatioTracker.from_config()
    policy = f"fcfs@conservativeness={conservativeness}"
    node = make_node(H800_QWEN3_32B, policy, SageConfig(), Options(), lambda _: None)
    ours = node.state.ratio
    assert ours.value == theirs.current
    for _ in range(700):
        theirs.decay_step()
        ours.decay(1)
        assert ours.value == pytest.approx(theirs.current, abs=1e-12)
    ours.reset()
    theirs.reset()
    assert ours.value == theirs.current


def test_capacity_is_measured_in_order_of_arrival() -> None:
    specs = ("hrrn@clip=64", "shortest-prefill-first", "lpm", "sage")
    assert [*map(by_arrival, specs)] == ["fcfs@clip=64", "fcfs", "lpm", "fcfs-fill"]


# Two idle nodes, and a request with a prompt of 1 s and a first-token deadline in 10 s.
IDLE = ClusterView(
    prefill_s=np.ones(2), cached_tokens=np.zeros(2, np.int64), input_tokens=10, answer_tokens=40.0,
    ttft_s=10.0, tpot_s=math.inf, gain=1.0, decode_s=np.zeros(2), queue_age_s=np.zeros(2),
    node=np.zeros(0, np.int64), tokens=np.zeros(0, np.int64), left_tokens=np.zeros(0),
    step_s=np.zeros(0), queue_node=np.zeros(0, np.int64), exec_s=np.zeros(0),
    remain_s=np.zeros(0), queue_gain=np.zeros(0), fixed_s=0.0,
)  # fmt: skip
# A prompt of 1 s that waits at the first node.
WAITS = {"queue_node": [0], "exec_s": [1.0], "queue_gain": [1.0]}
# A step of 0.5 s at most, half of it fixed: prefills take twice their time.
SHORT_STEPS = {"fixed_s": 0.25, "tpot_s": 0.5, "prefill_s": [1.0, 0.5]}
# Two requests at the first node, one at the second, with the tokens to come and their steps.
BESIDE = {"node": [0, 0, 1], "left_tokens": [70.0, 70.0, 999.0], "step_s": [0.01, 0.01, 0.02]}


@pytest.mark.parametrize(
    ("name", "facts", "picked"),
    [
        # Algorithm 2: the least loaded of the nearly idle, else the most loaded with room, else the
        # least loaded.
        ("gorouting", {"decode_s": [0.5, 0.2]}, 1),
        ("gorouting", {"decode_s": [2.9, 3.1]}, 0),
        ("gorouting", {"decode_s": [3.1, 5.9]}, 1),
        ("gorouting", {"decode_s": [3.1, 6.1]}, 0),
        ("gorouting", {"decode_s": [6.2, 6.1]}, 1),
        ("gorouting", {"decode_s": [3.1, 5.9], "queue_age_s": [0.0, 5.8]}, 1),
        ("gorouting", {"decode_s": [3.1, 4.0], "queue_age_s": [0.0, 3.0]}, 1),
        # Only nodes with a gain: the request is on time there, and makes no other request late.
        ("gorouting", {"decode_s": [9.1, 9.0]}, 1),
        ("gorouting", {"decode_s": [5.0, 4.0], "remain_s": [6.9], **WAITS}, 1),
        ("gorouting", {"decode_s": [5.0, 4.0], "remain_s": [7.1], **WAITS}, 0),
        ("gorouting", {"decode_s": [5.0, 4.0], "remain_s": [6.9], **WAITS, "gain": 30.0}, 0),
        ("gorouting", {"decode_s": [5.0, 4.0], "remain_s": [5.9], **WAITS}, 0),  # late anyway
        ("gorouting", {"decode_s": [8.4, 8.5]}, 0),
        ("gorouting", {"decode_s": [8.4, 8.5], **SHORT_STEPS}, 1),
        # All wait for the prefill. The others also wait for its steps while it runs with them.
        ("predicted-cost", {"prefill_s": [2.0, 1.0]}, 1),
        ("predicted-cost", BESIDE, 1),
        ("predicted-cost", {**BESIDE, "answer_tokens": 200.0}, 0),
        ("predicted-cost", {**BESIDE, "left_tokens": [1.0, 1.0, 90.0]}, 0),
    ],
)
def test_routers_pick_by_their_definitions(name: str, facts: dict[str, Any], picked: int) -> None:
    arrays = {key: np.array(of) if isinstance(of, list) else of for key, of in facts.items()}
    assert router_named(name).pick(IDLE._replace(**arrays)) == picked


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_picks_a_node_and_the_same_again(name: str) -> None:
    late = IDLE._replace(decode_s=np.array([20.0, 20.0]))  # none gains
    one, again = router_named(name, 5), router_named(name, 5)
    picked = [one.pick(late) for _ in range(8)]
    assert picked == [again.pick(late) for _ in range(8)]
    assert {*picked} == ({0, 1} if name in ("gorouting", "power_of_two", "round_robin") else {0})
