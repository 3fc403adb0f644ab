"""Policies by name and setting, as servers and the simulator take them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engines.rival import Rival
from bench.engines.server.policy_server import CPU_FLAGS, PolicyServers
from bench.engines.simulator.presets import H800_QWEN3_32B
from bench.engines.simulator.run import make_node
from bench.engines.simulator.state import Options
from sage_sched.cli import main
from sage_sched.config import SageConfig

numbers = st.floats(0, 1e6, allow_nan=False)


def test_a_name_alone_leaves_the_server_as_it_is() -> None:
    for name in ("fcfs", "sage", "dfs-weight"):
        rival = Rival.parse(name)
        assert rival.flags == ("--schedule-policy", name)
        assert (rival.env, rival.engine_fields) == ({}, {})


@given(st.none() | numbers, st.none() | st.integers(1, 10**6), st.booleans())
def test_settings_reach_flags_environment_and_simulator(
    conservativeness: float | None, clip: int | None, clip_first: bool
) -> None:
    parts = [] if conservativeness is None else [f"conservativeness={conservativeness}"]
    parts += [] if clip is None else [f"clip={clip}"]
    if not parts:
        return
    rival = Rival.parse("hrrn@" + ",".join(parts[::-1] if clip_first else parts))
    assert rival == Rival("hrrn", conservativeness, clip)
    given_flags = dict(zip(rival.flags[::2], rival.flags[1::2], strict=True))
    assert given_flags.pop("--schedule-policy") == "hrrn"
    assert [float(value) for value in given_flags.values()] == (
        [] if conservativeness is None else [conservativeness]
    )
    assert [int(value) for value in rival.env.values()] == ([] if clip is None else [clip])
    engine = replace(H800_QWEN3_32B, **rival.engine_fields)  # type: ignore[arg-type]
    assert engine.schedule_conservativeness == (1 if conservativeness is None else conservativeness)
    assert engine.clip_max_new_tokens == (4096 if clip is None else clip)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "names no policy"),
        ("@clip=3", "names no policy"),
        ("fcfs@", "the setting ''"),
        ("fcfs@boldness=1", "'boldness', allowed: NAME@conservativeness=...,clip=..."),
        ("fcfs@clip=3,", "the setting ''"),
        ("fcfs@clip", "clip is '', allowed: a whole number"),
        ("fcfs@clip=0", "clip is '0'"),
        ("fcfs@clip=1.5", "clip is '1.5'"),
        ("fcfs@conservativeness=low", "conservativeness is 'low', allowed: a number"),
        ("fcfs@conservativeness=-1", "conservativeness is '-1'"),
        ("fcfs@conservativeness=nan", "conservativeness is 'nan'"),
        ("fcfs@clip=3,clip=4", "sets clip twice"),
        ("sage@clip=3", "sage brings another"),
    ],
)
def test_what_is_no_policy_says_why(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="(?s).*" + message.replace("...", r"\.\.\.")):
        Rival.parse(spec)


def test_the_command_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--policies", "fcfs", "fcfs@boldness=1"])
    assert "allowed: NAME@" in capsys.readouterr().err


def test_a_server_is_started_with_them(tmp_path: Path) -> None:
    servers = PolicyServers(
        model=tmp_path, folder=tmp_path, flags=CPU_FLAGS, env={"A": "b"}, sage=SageConfig()
    )
    server = servers.server("fcfs@conservativeness=0.1,clip=512", "one")
    command = server._command
    assert command[command.index("--schedule-policy") + 1] == "fcfs"
    assert command[command.index("--schedule-conservativeness") + 1] == "0.1"
    assert server._env["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] == "512"
    assert server._env["A"] == "b"
    plain = servers.server("fcfs", "two")
    assert "--schedule-conservativeness" not in plain._command
    server.kill()
    plain.kill()


@pytest.mark.parametrize("conservativeness", [0.0, 0.1, 0.3, 1.0, 2.0])
def test_the_simulator_expects_of_answers_what_sglang_does(conservativeness: float) -> None:
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
