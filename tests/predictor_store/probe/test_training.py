from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from predictor_store.probe import training
from predictor_store.probe.file import ProbeFile, ProbeFileError, fingerprint
from predictor_store.probe.quality import quality_by_age
from predictor_store.probe.recording import Recording, RecordingError, about_recording
from predictor_store.probe.training import TrainingError, train
from sage_sched.cli import main
from tests.predictor_store.probes import EDGES, probe, write_recording

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads that wait for one another are slow on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_probe_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = probe(layer=3)
    written.write(tmp_path / "probe")
    read = ProbeFile.read(tmp_path / "probe")
    states = np.random.default_rng(0).normal(size=(5, 128)).astype(np.float32)
    assert np.array_equal(read.log_p(states), written.log_p(states))
    assert np.exp(read.log_p(states)).sum(axis=1) == pytest.approx(np.ones(5))
    assert (read.layer, read.fingerprint) == (3, "0123")
    assert np.array_equal(read.edges, written.edges)


def test_a_probe_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    probe().write(path)
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["sage_sched"])
    arrays, whole = load_file(path), path.read_bytes()
    wrong: list[tuple[dict[str, object], dict[str, object]]] = [
        ({"format": "sage-sched probe 9"}, {}),
        ({"pooling": "mean"}, {}),
        ({"hidden_size": 64}, {}),
        ({"hidden_size": -1}, {}),
        ({"edges": [*about["edges"][:-1], about["edges"][-2]]}, {}),
        ({"edges": [1, *about["edges"][1:]]}, {}),
        ({}, {"w1": np.full_like(arrays["w1"], np.nan)}),
        ({}, {"b2": arrays["b2"].astype(np.float64)}),
        ({}, {"b2": arrays["b2"][:-1]}),
    ]
    for fields, other in wrong:
        save_file(arrays | other, path, metadata={"sage_sched": json.dumps(about | fields)})
        with pytest.raises(ProbeFileError, match="cannot be used"):
            ProbeFile.read(path)
    save_file({"w1": np.zeros(3, np.float32)}, path)
    for content in (path.read_bytes(), b"", whole[:100], whole[:-10]):
        path.write_bytes(content)
        with pytest.raises(ProbeFileError):
            ProbeFile.read(path)


def test_a_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    def model(weights: float, config: str = "{}") -> str:
        (tmp_path / "config.json").write_text(config)
        save_file({"w": np.full((100, 100), weights, np.float32)}, tmp_path / "model.safetensors")
        return fingerprint(tmp_path)

    with pytest.raises(ValueError, match="not a model's folder"):
        fingerprint(tmp_path)
    assert model(1.0) == model(1.0)
    assert len({model(1.0), model(2.0), model(1.0, '{"hidden_size": 2}')}) == 3


@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_epoch_is_kept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(600, 4)).astype(np.float32)
    bins, is_cut = rng.integers(0, 8, 600), rng.random(600) < 0.3  # there is nothing to learn
    said = list[str]()
    data = [(states[of], bins[of], is_cut[of]) for of in (slice(400), slice(400, 600))]
    best, arrays = training._fit(data, 8, 10, seed, said.append, "layer 0")
    losses = [float(line.split()[-2]) for line in said]
    assert best == pytest.approx(min(losses), abs=1e-4)
    assert len(said) == 1 + losses.index(min(losses)) + 3  # until three are worse
    log_p = ProbeFile(*arrays, layer=0, fingerprint="", edges=EDGES).log_p(states[400:])
    above = np.arange(8) >= bins[400:, None]
    alone = np.arange(8) == bins[400:, None]
    p = np.where(np.where(is_cut[400:, None], above, alone), np.exp(log_p), 0).sum(axis=1)
    assert best == pytest.approx(-np.log(p).mean(), rel=1e-4)


# MAE, CRPS, coverage and answers at the ages 0 and 64, by the prompt and by a probe that knows
# nothing.
KNOWN = [
    [190.61, 100.35, 0.426, 61], [2.16, 9.76, 0, 35], [184.61, 112.27, 1, 61], [89.5, 58.88, 1, 35]
]  # fmt: skip


def test_prompts_are_split_and_cut_answers_are_not_reported_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for session in (1, 2):
        write_recording(tmp_path, 200, session)
    read = Recording.read(tmp_path)
    left = read.lengths[read.answer] - read.ages
    assert read.states[:, 1, 0] == pytest.approx(np.log(left), rel=1e-3)
    # With 410 tokens, some lengths are the edge of a bin.
    recording = replace(read, is_cut=np.arange(400) % 4 == 0, lengths=read.lengths + 10)
    left += 10
    seen = []

    def fit(data: Any, num_bins: int, *_: object) -> Any:
        seen.append(data)
        arrays = np.zeros((1, 8)), np.zeros(1), np.zeros((num_bins, 1)), np.zeros(num_bins)
        return 0.0, arrays

    monkeypatch.setattr(training, "_fit", fit)
    trained = train(recording)
    digits = recording.prompts[recording.answer] % np.uint64(10)
    is_cut = recording.is_cut[recording.answer]
    for data, rows in zip(seen[0], (digits < 7, digits == 7), strict=True):
        bins = (left[rows][:, None] > trained.probe.edges).sum(axis=1) - 1
        assert [one.tolist() for one in data[1:]] == [bins.tolist(), is_cut[rows].tolist()]
    reported = (digits > 7) & ~is_cut & (recording.ages == 0)
    assert reported.sum() == KNOWN[0][-1]
    found = [[*astuple(of[age])] for of in trained.qualities.values() for age in (0, 64)]
    assert found == pytest.approx(np.array(KNOWN), rel=1e-2)


def test_states_that_tell_are_found_and_used(tmp_path: Path) -> None:
    write_recording(tmp_path, 300)
    trained = train(Recording.read(tmp_path), say=lambda line: None)
    assert trained.probe.layer == 1
    assert trained.qualities["probe"][4].crps < 0.5 * trained.qualities["prompt"][4].crps
    assert trained.qualities["probe"][4].mae < 0.5 * trained.qualities["prompt"][4].mae


def test_the_command_reports_its_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.probe.training._PATIENCE", 1)
    recorded, out = tmp_path / "recorded", tmp_path / "probe"
    arguments = ["train-probe", str(recorded), "--out", str(out)]
    assert main(arguments) == 2
    assert "no recording" in capsys.readouterr().err
    write_recording(recorded, 200)
    assert main(arguments) == 0
    assert "held-out loss" in capsys.readouterr().out
    assert np.diff(ProbeFile.read(out).edges)[:9].tolist() == pytest.approx([51.2] * 9, abs=1)
    # A probe is kept from weights.
    (tmp_path / "config.json").write_text("{}")
    assert main([*arguments[:-1], str(out.with_suffix(".safetensors"))]) == 2
    assert "would take it for weights" in capsys.readouterr().err


def test_too_little_is_no_recording(tmp_path: Path) -> None:
    write_recording(tmp_path, 30)
    with pytest.raises(TrainingError, match="fewer than 20 answers"):
        train(Recording.read(tmp_path), say=lambda line: None)
    with pytest.raises(RecordingError, match="these are of"):
        about_recording(tmp_path, {"fingerprint": "another", "hidden_size": 8, "layers": [0, 1]})


def test_a_recording_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    write_recording(tmp_path, 50)
    whole = Recording.read(tmp_path)
    (rows,) = tmp_path.glob("*.rows")
    rows.write_bytes(rows.read_bytes()[:-7])
    (answers,) = tmp_path.glob("*.answers.jsonl")
    answers.write_text(answers.read_text()[:-30])
    cut = Recording.read(tmp_path)
    assert len(cut.lengths) == len(whole.lengths) - 1
    assert len(whole.ages) - 12 <= len(cut.ages) < len(whole.ages)


def test_forecasts_are_scored_by_age() -> None:
    lengths, weights = np.array([1.0, 5.0, 9.0]), np.array([0.2, 0.5, 0.3])
    found = quality_by_age([(4, 3, lengths, weights), (5, 3, lengths, weights)])[4]
    spread = np.abs(lengths[:, None] - lengths) * np.outer(weights, weights)
    assert found.crps == pytest.approx(np.abs(lengths - 3) @ weights - spread.sum() / 2)
    assert (found.mae, found.number, bool(found.covered)) == (pytest.approx(2.4), 1, True)
