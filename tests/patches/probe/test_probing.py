"""Hidden states are recorded, or read as scores of rank 0, which count on all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from patches.failures import Failures
from patches.messages import Scores
from patches.probe.recorder import Recorder
from patches.probe.scores import MANY_RUNNING, PASSES_A_MESSAGE, Probing
from patches.probe.tap import Tap
from sage_sched.app.registry import policy_named
from tests.engine.serving import wait_until
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import Server, StandInBatch, make_request
from tests.predictor_store.probes import probe
from tests.sage_sched.strategies import SERVER

# By these logits the answer is long.
LONG = np.array([[0.0, 0, 0, 0, 0, 0, 0, 9.0]], np.float32)


class Rank:
    def __init__(self) -> None:
        self.server = Server()
        core = self.server.state.core
        core.policy = policy_named("trail", {}, SERVER)
        self.probing = Probing(core, probe(), None, Failures())
        self.server.state.listeners.append(self.probing)
        (self.req,) = self.server.arrive(make_request([20, 400] * 50))
        self.job = self.req.sage.job

    def read(self, age: int, logits: Any = LONG, states: Any = None, num_others: int = 0) -> Any:
        """Give the request a token in a batch of others, and return the broadcast of rank 0."""
        batch: Any = StandInBatch([self.req] * (1 + num_others))
        commits = [SimpleNamespace(output_index=age), *[None] * num_others]
        self.probing.read(batch, commits, np.repeat(logits, 1 + num_others, axis=0), states)
        return self.probing.polled()

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.probing.stats()["probe"]
        return found


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_scores_are_repeated_until_they_return(rank: Rank) -> None:
    first = rank.read(1)
    assert isinstance(first, Scores)
    assert rank.job.revision == 0  # rank 0 also counts only broadcast scores
    again = rank.read(2)
    assert again.ages == [1, 2]
    rank.probing.scored(first)
    assert rank.job.revision == 1
    left = rank.probing.polled()
    assert left is not None
    assert left.ages == [2]
    rank.probing.scored(again)  # the first one has come before
    assert (rank.job.revision, rank.probing.polled()) == (2, None)
    other_rank = Rank()
    other_rank.probing.scored(again)
    assert rank.job.refined is not None
    assert other_rank.job.refined is not None
    assert other_rank.job.refined.weights == pytest.approx(rank.job.refined.weights)


def test_scores_of_many_requests_are_sent_every_few_passes(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages = range(1, PASSES_A_MESSAGE + 1)
    *held_back, scores = [rank.read(age, num_others=MANY_RUNNING) for age in ages]
    assert held_back == [None] * (PASSES_A_MESSAGE - 1)
    assert scores.ages == [*ages]
    rank.probing.scored(scores)
    assert rank.probing.polled() is None
    # The policy hears that scores by old weights no longer count.
    told: list[Any] = []
    monkeypatch.setattr(rank.server.state.core.policy, "rank", told.append)
    rank.probing.weights_updated()
    assert (told, rank.job.refined) == ([rank.job], None)
    # With few requests they are sent at once.
    assert rank.read(8) is not None


def test_scores_that_are_not_finite_are_counted_and_dropped(rank: Rank) -> None:
    assert rank.read(1, np.full((1, 8), np.nan, np.float32)) is None
    assert rank.stats()["num_not_finite"] == 1
    assert rank.read(2) is not None


def test_a_rank_that_can_read_no_longer_still_takes_scores_in(rank: Rank) -> None:
    scores = rank.read(1)
    rank.read(2, LONG[:0])  # scores of no request, though one decodes
    rank.read(4)
    rank.probing.scored(scores)
    assert (rank.job.revision, rank.probing.polled()) == (1, None)


@pytest.mark.parametrize(
    ("event", "num_scores", "num_errors"),
    [
        (lambda rank: None, 1, 0),
        (lambda rank: rank.probing.ended(rank.req, was_aborted=False), 0, 0),
        (lambda rank: rank.probing.weights_updated(), 0, 0),
        # The policy was switched meanwhile, and switched back.
        (lambda rank: rank.probing.switched("", ()), 0, 0),
        (lambda rank: setattr(rank.probing._refiner, "refine", fail), 0, 1),
    ],
)
def test_scores_count_until(rank: Rank, event: Any, num_scores: int, num_errors: int) -> None:
    scores = rank.read(1)
    event(rank)
    rank.probing.scored(scores)
    assert (rank.stats()["num_scores"], rank.job.revision) == (num_scores, num_scores)
    assert rank.probing._failures.num_failures == num_errors
    assert rank.probing.polled() is None


STATES = np.zeros((1, 1, 4), np.float16)


def record(rank: Rank, folder: Path, max_bytes: int = 1 << 30) -> Recorder:
    rank.probing.recorder = Recorder(folder, max_bytes, [0], {"hidden_size": 4, "fingerprint": "0"})
    return rank.probing.recorder


@pytest.mark.parametrize("was_aborted", [False, True])
def test_states_and_lengths_are_recorded_for_the_owner_alone(
    rank: Rank, tmp_path: Path, was_aborted: bool
) -> None:
    recorder = record(rank, tmp_path / "recorded")
    for age in (1, 2, 3):
        rank.read(age, states=STATES)
    for num_tokens in (999, 1000):
        (req,) = rank.server.arrive(make_request([9]))
        req.sage.job.grow(num_tokens)
        rank.probing.ended(req, was_aborted)
    rank.read(4, states=STATES)
    wait_until(lambda: recorder._queue.empty() and recorder.stats()["num_rows"] == 3)
    wait_until(lambda: sum(file.stat().st_size for file in tmp_path.rglob("*.rows")) > 0)
    answers = [
        json.loads(line)
        for file in tmp_path.rglob("*.answers.jsonl")
        for line in file.read_text().splitlines()
    ]
    found = [(answer["tokens"], answer["is_cut"], answer["cap"]) for answer in answers]
    assert found == ([] if was_aborted else [(999, False, 1000), (1000, True, 1000)])
    files = [file for file in (tmp_path / "recorded").iterdir() if file.is_file()]
    assert not any(file.stat().st_mode & 0o077 for file in files)


def test_a_full_disk_ends_it(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kw: object) -> int:
        raise OSError(28, "No space left on device")

    recorder = record(rank, tmp_path / "recorded")
    monkeypatch.setattr("patches.probe.recorder.own_file", full)
    rank.read(1, states=STATES)
    wait_until(lambda: recorder.stats()["is_stopped"])
    rank.read(2, states=STATES)
    assert recorder.stats()["num_rows"] == 1


def test_old_states_make_room(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.probe.recorder._SEGMENT_BYTES", 1000)
    recorder = record(rank, tmp_path, 3000)
    for number in range(1, 401):
        rank.read(1, states=STATES)
        recorder.ended(rank.req, 5)
        if number % 100 == 0:
            wait_until(lambda: recorder._queue.empty())
    assert sum(path.stat().st_size for path in tmp_path.glob("*.rows")) < 4200
    segments = {path.name.partition(".")[0] for path in tmp_path.glob("*.rows")}
    assert len(segments) > 1
    # Their answers go too.
    assert {path.name.partition(".")[0] for path in tmp_path.glob("*.answers.jsonl")} <= segments
    assert recorder.stats()["num_dropped"] == 0


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_tap_reads_the_rows_that_are_sampled(is_packed: bool) -> None:
    read: list[Any] = []
    probing: Any = SimpleNamespace(read=lambda *about: read.extend(about))
    file = probe(hidden_size=4, layer=1)
    tap = Tap(file, [0, 2], 4, "cpu", lambda: probing)
    layers = [*torch.randn(3, 3, 4).half().float()]
    tap.capture(torch.cat(layers, dim=-1) if is_packed else layers, torch.tensor([2, 0]))
    output = tap.after_sample(True, torch.zeros(2))
    tap.capture([torch.zeros(2, 4)] * 3, None)  # by the next step
    assert output is not None
    output.copy_to_host(torch.clone).consume("a batch", "commits")  # type: ignore[arg-type]
    first, of_probe, last = (states[[2, 0]].numpy() for states in layers)
    inner = np.maximum(of_probe @ file.w1.T + file.b1, 0)
    assert read[:2] == ["a batch", "commits"]
    assert read[2] == pytest.approx(inner @ file.w2.T + file.b2, rel=1e-4, abs=1e-5)
    assert (read[3] == np.stack([first, last], axis=1)).all()
    tap.capture([torch.ones(5000, 4)] * 3, None)  # more rows than it reads
    assert not tap.states[0].any()  # type: ignore[index]
    assert tap.after_sample(True, torch.zeros(5000)) is None
