"""Which probes a server starts with, and what becomes of what they say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.engines.server.model import write_model
from patches.compat import UnsupportedServerError
from patches.messages import Scores
from patches.probe.recorder import Recorder
from patches.probe.scores import MANY_RUNNING, PASSES_A_MESSAGE, Probing
from patches.probe.setup import recorded_layers, refuse_probe
from predictor_store.probe.file import fingerprint
from sage_sched.app.config import ProbeConfig, SageConfig
from sage_sched.app.registry import policy_named
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from tests.predictor_store.probes import probe
from tests.sage_sched.strategies import SERVER


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", num_layers=3, vocab_size=512)


def refuse(
    model: Path, probe_file: str = "", policy: str = "trail", record: str = "", **flags: object
) -> None:
    args = SimpleNamespace(
        schedule_policy=policy,
        model_path=str(model),
        enable_return_hidden_states=False,
        speculative_algorithm=None,
        enable_dp_attention=False,
        disaggregation_mode="null",
    )
    vars(args).update(flags)
    refuse_probe(args, SageConfig(probe=ProbeConfig(file=probe_file, record=record)))


def test_a_policy_that_uses_a_probe_needs_one(model: Path) -> None:
    with pytest.raises(UnsupportedServerError, match=r"needs a probe.*probe\.file"):
        refuse(model)
    refuse(model, policy="sage")
    refuse(model, policy="trail-prompt")


def test_a_probe_of_this_model_will_do(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "probe"
    probe(fingerprint(model), layer=1).write(file)
    refuse(model, str(file))
    refuse(model, str(file), "sage")


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"fingerprint": "0123"}, ["0123"]),
        ({"hidden_size": 64}, ["64", "128"]),
        ({"layer": 2}, ["layer 2", "0 to 1"]),
    ],
)
def test_a_probe_of_another_model_stops_the_start_and_both_values_are_named(
    model: Path, tmp_path: Path, change: dict[str, Any], both: list[str]
) -> None:
    file = tmp_path / "probe"
    probe(**{"fingerprint": fingerprint(model), **change}).write(file)
    with pytest.raises(UnsupportedServerError) as refused:
        refuse(model, str(file))
    for value in [*both, *([fingerprint(model)] if "fingerprint" in change else [])]:
        assert value in str(refused.value)


def test_a_damaged_probe_and_none_at_all_stop_the_start(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "probe"
    with pytest.raises(UnsupportedServerError, match="No such file"):
        refuse(model, str(file))
    file.write_bytes(b"\x10" * 100)
    with pytest.raises(UnsupportedServerError, match="cannot be used"):
        refuse(model, str(file))


@pytest.mark.parametrize(
    "flag",
    [
        {"enable_return_hidden_states": True},
        {"speculative_algorithm": "EAGLE"},
        {"enable_dp_attention": True},
        {"disaggregation_mode": "decode"},
    ],
)
def test_what_it_does_not_go_with_is_refused(
    model: Path, tmp_path: Path, flag: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedServerError, match=next(iter(flag)).replace("_", "-")):
        refuse(model, policy="sage", record=str(tmp_path), **flag)
    refuse(model, policy="sage", **flag)


def test_a_model_of_one_layer_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "hidden_size": 8}))
    with pytest.raises(UnsupportedServerError, match="1 layer"):
        refuse(tmp_path, policy="sage", record=str(tmp_path))


def test_the_last_layer_is_never_recorded() -> None:
    assert recorded_layers(2) == [0]
    assert recorded_layers(4) == [0, 1, 2]
    assert recorded_layers(32) == [0, 6, 12, 18, 24, 30]


def probing() -> tuple[Probing, Job]:
    """Of one rank, with a job that runs."""
    policy = policy_named("trail", {}, SERVER)
    known = LengthDistribution.from_samples([20, 400] * 50, "history")
    job = Job(0, 10, 1000, known, 0)
    assert policy.on_arrival(job)
    one = Probing(policy, probe(), None)
    assert one.refining is not None
    one.refining.arrived(job)
    return one, job


def step(job: Job, age: int) -> tuple[Any, list[Any]]:
    """A batch of one, and what was committed of it."""
    req = SimpleNamespace(sage=SimpleNamespace(job=job))
    return SimpleNamespace(reqs=[req]), [SimpleNamespace(output_index=age)]


LONG = np.array([[0.0, 0, 0, 0, 0, 0, 0, 9.0]], np.float32)


def test_scores_are_told_until_they_have_come_and_once_applied() -> None:
    one, job = probing()
    one.read(*step(job, 1), LONG, None)
    first = one.news()
    assert isinstance(first, Scores)
    assert job.revision == 0  # on rank 0, too, only what has come counts
    one.read(*step(job, 2), LONG, None)
    again = one.news()
    assert again is not None
    assert again.ages == [1, 2]
    one.told(first)
    assert job.revision == 1
    left = one.news()
    assert left is not None
    assert left.ages == [2]
    one.told(again)  # what has come before is no news
    assert job.revision == 2
    assert one.news() is None
    other, same = probing()
    other.told(again)
    assert same.refined is not None
    assert job.refined is not None
    assert same.refined.weights == pytest.approx(job.refined.weights)


def test_where_many_run_scores_are_told_every_few_passes_together() -> None:
    one, job = probing()
    req = SimpleNamespace(sage=SimpleNamespace(job=job))
    batch: Any = SimpleNamespace(reqs=[req] * (MANY_RUNNING + 1))
    ages = iter(range(1, 100))

    def news() -> Scores | None:
        commits = [SimpleNamespace(output_index=next(ages))] + [None] * MANY_RUNNING
        one.read(batch, commits, np.repeat(LONG, MANY_RUNNING + 1, axis=0), None)
        return one.news()

    assert [news() for _ in range(PASSES_A_MESSAGE - 1)] == [None] * (PASSES_A_MESSAGE - 1)
    told = news()
    assert told is not None
    assert told.ages == [1, 2, 3, 4][:PASSES_A_MESSAGE]
    one.told(told)
    assert one.news() is None
    # Few again: at once.
    one.read(*step(job, 8), LONG, None)
    assert one.news() is not None


def test_scores_that_are_no_numbers_are_counted_and_dropped() -> None:
    one, job = probing()
    one.read(*step(job, 1), np.full((1, 8), np.nan, np.float32), None)
    assert one.news() is None
    assert one.stats()["num_not_finite"] == 1
    one.read(*step(job, 2), LONG, None)
    assert one.news() is not None


def test_a_rank_that_can_read_no_longer_applies_what_it_has_told_as_the_others_do() -> None:
    one, job = probing()
    one.read(*step(job, 1), LONG, None)
    told = one.news()
    assert told is not None
    one.read(*step(job, 2), LONG[:0], None)  # of nobody, though one decodes
    one.read(*step(job, 4), LONG, None)
    one.told(told)
    assert job.revision == 1
    assert one.news() is None


def test_scores_of_a_request_that_is_gone_are_dropped() -> None:
    one, job = probing()
    one.read(*step(job, 1), LONG, None)
    news = one.news()
    del job
    assert news is not None
    one.told(news)
    assert one.stats()["num_scores"] == 0


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kw: object) -> int:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "recorded", 1 << 30, [0], {"hidden_size": 4, "fingerprint": "0"})
    monkeypatch.setattr("patches.probe.recorder.own_file", full)
    _, job = probing()
    states = np.zeros((1, 1, 4), np.float16)
    recorder.read(*step(job, 1), states)
    recorder._thread.join(timeout=60)
    assert recorder.stats()["is_stopped"]
    recorder.read(*step(job, 2), states)
    assert recorder.stats()["num_rows"] == 1


def test_the_oldest_states_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.probe.recorder._SEGMENT_BYTES", 1000)
    recorder = Recorder(tmp_path, 3000, [0], {"hidden_size": 4, "fingerprint": "0"})
    _, job = probing()
    for _ in range(400):
        while recorder._queue.full():
            pass
        recorder.read(*step(job, 1), np.zeros((1, 1, 4), np.float16))
    while not recorder._queue.empty():
        pass
    assert sum(path.stat().st_size for path in tmp_path.glob("*.rows")) < 4200
    assert len([*tmp_path.glob("*.rows")]) > 1
