"""Policies by name and setting, as servers and the simulator take them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from bench.policies.rival import Rival, by_arrival
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
