"""The check of two ranks, on a server that is not started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import PolicyServers
from bench.engines.server.server import ServerError
from predictor_store.probe.file import ProbeFile
from tests.checks import probe_ranks
from tests.checks.exactness import Spoken


def test_noise_is_sure_of_one_bin_now_and_of_another_then(tmp_path: Path) -> None:
    written = probe_ranks.noise(write_model(tmp_path / "model", hidden_size=128))
    written.write(tmp_path / "probe.safetensors")
    probe = ProbeFile.read(tmp_path / "probe.safetensors")
    states = np.random.default_rng(1).normal(size=(200, probe.hidden_size)).astype(np.float32)
    log_p = probe.log_p(states)
    assert np.median(np.exp(log_p.max(axis=1))) > 0.99
    assert len(set(log_p.argmax(axis=1))) > log_p.shape[1] / 2


@pytest.fixture
def yields_a_round(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In the place of servers, one that counts as many yields in each round; a round that is not
    there is answered as by a server that has ended."""
    yields: list[int] = []
    done: list[int] = []

    @contextmanager
    def server(self: PolicyServers, policy: str, label: str) -> Iterator[None]:
        assert policy == "trail"
        yield

    def ask(
        server: None, asked: Sequence[tuple[str, int]], at_a_time: int, label: str
    ) -> list[Spoken]:
        if len(done) == len(yields):
            raise ServerError("it has ended")
        done.append(yields[len(done)])
        return [Spoken("", [0] * num_tokens, [], 0) for _, num_tokens in asked]

    def state(server: None) -> dict[str, Any]:
        return {
            "preemption": {"num_preemptions": sum(done)},
            "probe": {"num_scores": 1000 * len(done)},
            "num_policy_errors": 0,
        }

    monkeypatch.setattr(PolicyServers, "server", server)
    monkeypatch.setattr(PolicyServers, "warm", lambda self, observations: None)
    monkeypatch.setattr(probe_ranks, "ask", ask)
    monkeypatch.setattr(probe_ranks, "scheduler_state", state)
    return yields


@pytest.mark.parametrize(
    ("rounds", "status", "said"),
    [
        ([300, 250], 0, "300 requests, 0 of another length; 550 yields"),
        ([300], 1, "it has ended"),
        ([10] * 20, 2, "too few yields"),
    ],
)
def test_it_asks_until_enough_have_yielded(
    yields_a_round: list[int],
    rounds: list[int],
    status: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    yields_a_round.extend(rounds)
    assert probe_ranks.main(["--output", str(tmp_path)]) == status
    assert said in "".join(capsys.readouterr())
