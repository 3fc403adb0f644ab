from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.runtime_context import get_parallel

from bench.engines.server.model import write_model
from patches.compat import UnsupportedServerError
from patches.failures import Failures
from patches.probe.setup import model_shape, probing_of, recorded_layers, refuse_probe
from predictor_store.probe.file import fingerprint
from sage_sched.app.config import ProbeConfig, SageConfig
from sage_sched.app.registry import policy_named
from tests.predictor_store.probes import probe
from tests.sage_sched.strategies import SERVER, core_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", num_layers=3, vocab_size=512)


def refuse(
    model: Path, probe_file: str = "", policy: str = "trail", record: str = "", **flags: object
) -> None:
    args = SimpleNamespace(
        schedule_policy=policy, model_path=str(model), enable_return_hidden_states=False,
        speculative_algorithm=None, enable_dp_attention=False, disaggregation_mode="null",
    )  # fmt: skip
    vars(args).update(flags)
    refuse_probe(args, SageConfig(probe=ProbeConfig(file=probe_file, record=record)))


def test_a_policy_that_uses_a_probe_needs_one_of_this_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedServerError, match=r"needs a probe"):
        refuse(model)
    for policy in ("sage", "trail-prompt"):
        refuse(model, policy=policy)
    probe(fingerprint(model), layer=1).write(tmp_path / "probe")
    for policy in ("trail", "sage"):
        refuse(model, str(tmp_path / "probe"), policy)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fingerprint": "0123"}, "0123"),
        ({"hidden_size": 64}, "64"),
        ({"layer": 2}, "layer 2"),
        (b"\x10" * 100, "cannot be used"),
        (None, "No such file"),
    ],
)
def test_another_probe_stops_the_start(
    model: Path, tmp_path: Path, change: Any, named: str
) -> None:
    file = tmp_path / "probe"
    if isinstance(change, bytes):
        file.write_bytes(change)
    elif change is not None:
        probe(**{"fingerprint": fingerprint(model), **change}).write(file)
    with pytest.raises(UnsupportedServerError, match=named):
        refuse(model, str(file))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("enable_return_hidden_states", True),
        ("speculative_algorithm", "EAGLE"),
        ("enable_dp_attention", True),
        ("disaggregation_mode", "decode"),
    ],
)
def test_unfit_servers_are_refused(model: Path, tmp_path: Path, flag: str, value: object) -> None:
    with pytest.raises(UnsupportedServerError, match=flag.replace("_", "-")):
        refuse(model, policy="sage", record=str(tmp_path), **{flag: value})
    refuse(model, policy="sage", **{flag: value})


def test_the_last_layer_is_never_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "hidden_size": 8}))
    with pytest.raises(UnsupportedServerError, match="1 layer"):
        refuse(tmp_path, policy="sage", record=str(tmp_path))
    shape = {"text_config": {"num_hidden_layers": 3, "hidden_size": 8}}  # it sees pictures too
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert model_shape(tmp_path) == (3, 8)
    recorded = {num_layers: recorded_layers(num_layers) for num_layers in (2, 4, 32)}
    assert recorded == {2: [0], 4: [0, 1, 2], 32: [0, 6, 12, 18, 24, 30]}


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_records(model: Path, tmp_path: Path, rank: int) -> None:
    scheduler: Any = SimpleNamespace(server_args=SimpleNamespace(model_path=str(model)))
    core = core_of(policy_named("sage", {}, SERVER))
    with get_parallel().override(tp_rank=rank):
        found = probing_of(scheduler, core, ProbeConfig(record=str(tmp_path)), Failures())
    assert found is not None
    assert (found.probe, found.recorder is None) == (None, rank > 0)
