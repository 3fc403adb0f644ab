"""Policies by name and setting, as servers and the simulator take them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.policies.rival import Rival, by_arrival
from bench.simulator.node import Node
from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.run import make_node
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig
from sage_sched.cli import main


def node_of(spec: str) -> Node:
    return make_node(H800_QWEN3_32B, spec, SageConfig(), Options(), lambda _: None)


@pytest.mark.parametrize(
    ("spec", "conservativeness", "clip"),
    [
        ("sage", None, None),
        ("hrrn@conservativeness=0.25", 0.25, None),
        ("hrrn@clip=512,conservativeness=0.25", 0.25, 512),
    ],
)
def test_settings_reach_flags_environment_and_simulator(
    spec: str, conservativeness: float | None, clip: int | None
) -> None:
    rival = Rival.parse(spec)
    flags = dict(zip(rival.flags[::2], rival.flags[1::2], strict=True))
    assert flags.pop("--schedule-policy") == rival.policy == spec.partition("@")[0]
    said = {"--schedule-conservativeness": str(conservativeness)}
    assert flags == (said if conservativeness else {})
    name = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
    assert rival.env == ({} if clip is None else {name: str(clip)})
    engine = node_of(spec).state.engine
    assert engine.schedule_conservativeness == (conservativeness or 1.0)
    assert engine.clip_max_new_tokens == (clip or 4096)


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
        ("sage@clip=3", "sage brings another"),
    ],
)
def test_unknown_policies_fail(spec: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--policies", "fcfs", spec])
    assert message in " ".join(capsys.readouterr().err.split())


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


@pytest.mark.parametrize(
    ("spec", "same_admission"),
    [
        ("hrrn@clip=64", "fcfs@clip=64"),
        ("shortest-prefill-first", "fcfs"),
        ("lpm", "lpm"),
        ("sage", "fcfs-fill"),
    ],
)
def test_capacity_is_measured_in_order_of_arrival(spec: str, same_admission: str) -> None:
    assert by_arrival(spec) == same_admission
