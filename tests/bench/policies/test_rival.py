"""Policies by name and setting, as servers and the simulator take them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from bench.policies.rival import Rival, by_arrival
from bench.simulator.node import Node
from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.run import make_node
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig


def node_of(spec: str) -> Node:
    return make_node(H800_QWEN3_32B, spec, SageConfig(), Options(), lambda _: None)


FLAG, CLIP = "--schedule-conservativeness", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"


@pytest.mark.parametrize(
    ("spec", "flags", "env", "simulated"),
    [
        ("sage", (), {}, (1.0, 4096)),
        ("hrrn@conservativeness=0.25", (FLAG, "0.25"), {}, (0.25, 4096)),
        ("hrrn@clip=512,conservativeness=0.5", (FLAG, "0.5"), {CLIP: "512"}, (0.5, 512)),
    ],
)
def test_settings_reach_flags_environment_and_simulator(
    spec: str, flags: tuple[str, ...], env: dict[str, str], simulated: tuple[float, int]
) -> None:
    rival = Rival.parse(spec)
    assert rival.flags == ("--schedule-policy", spec.partition("@")[0], *flags)
    engine = node_of(spec).state.engine
    settings = engine.schedule_conservativeness, engine.clip_max_new_tokens
    assert (rival.env, settings) == (env, simulated)


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
    ours = node_of(f"fcfs@conservativeness={conservativeness}").state.ratio
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
