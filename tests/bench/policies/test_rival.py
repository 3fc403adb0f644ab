"""Policies by name and setting, as servers and the simulator take them."""

from __future__ import annotations

import pytest

from bench.policies.rival import Rival, by_arrival
from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.run import make_node
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig
from sage_sched.cli import main


@pytest.mark.parametrize(
    ("spec", "rival"),
    [
        ("sage", Rival("sage", None, None)),
        ("hrrn@conservativeness=0.25", Rival("hrrn", 0.25, None)),
        ("hrrn@clip=512", Rival("hrrn", None, 512)),
        ("hrrn@clip=512,conservativeness=0.25", Rival("hrrn", 0.25, 512)),
    ],
)
def test_settings_reach_flags_environment_and_simulator(spec: str, rival: Rival) -> None:
    assert Rival.parse(spec) == rival
    flags = dict(zip(rival.flags[::2], rival.flags[1::2], strict=True))
    assert flags.pop("--schedule-policy") == rival.policy
    conservativeness, clip = rival.conservativeness, rival.clip_tokens
    if conservativeness is not None:
        assert flags.pop("--schedule-conservativeness") == str(conservativeness)
    assert flags == {}
    name = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
    assert rival.env == ({} if clip is None else {name: str(clip)})
    node = make_node(H800_QWEN3_32B, spec, SageConfig(), Options(), lambda _: None)
    assert node.state.engine.schedule_conservativeness == (conservativeness or 1.0)
    assert node.state.engine.clip_max_new_tokens == (clip or 4096)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "names no policy"),
        ("@clip=3", "names no policy"),
        ("fcfs@", "the setting ''"),
        ("fcfs@boldness=1", "'boldness', allowed: NAME@conservativeness=...,clip=..."),
        ("fcfs@clip=3,", "the setting ''"),
        ("fcfs@clip=0", "clip is '0'"),
        ("fcfs@clip=1.5", "clip is '1.5', allowed: a whole number"),
        ("fcfs@conservativeness=low", "conservativeness is 'low', allowed: a number"),
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


@pytest.mark.parametrize("conservativeness", [0.0, 0.1, 0.3, 1.0, 2.0])
def test_the_new_token_ratio_is_sglangs(conservativeness: float) -> None:
    tracker_module = pytest.importorskip(
        "sglang.srt.managers.scheduler_components.new_token_ratio_tracker"
    )

    class Schedule:
        schedule_conservativeness = conservativeness

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracker_module, "get_schedule", Schedule)
        theirs = tracker_module.NewTokenRatioTracker.from_config()
    spec = f"fcfs@conservativeness={conservativeness}"
    node = make_node(H800_QWEN3_32B, spec, SageConfig(), Options(), lambda _: None)
    ours = node.state.ratio
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
