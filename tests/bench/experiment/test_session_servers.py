"""What servers are asked for requests that have lengths alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engines.server.client import Answer
from bench.engines.server.kept_server import Run
from bench.engines.server.server import ServerError
from bench.experiment import session_servers
from bench.experiment.session_servers import SessionServers
from bench.experiment.spec import Load
from bench.policies.arm import Arm
from bench.workloads.forced_length import LENGTH_KEY
from bench.workloads.two_kinds import LS_URGENCY, TwoKinds
from sage_sched.job import DEFAULT_URGENCY, Hints
from tests.bench.engines.server.test_client import REQUEST

SHARED = replace(
    REQUEST, hints=Hints(session="one", urgency=LS_URGENCY, ttft_slo_ms=9.0), spans=((7, 0, 40),)
)
LONGER = replace(SHARED, input_tokens=60, spans=((7, 0, 40), (8, 0, 20)), follows=0, pause_s=3.0)
ANSWERED = Answer(0.0, ((1.0, 1), (2.0, 9)), 40, 7)


def served(monkeypatch: pytest.MonkeyPatch, run: Run) -> tuple[dict[str, Any], Any]:
    """What was sent, and what was seen of it, where a server answers so."""
    sent: dict[str, Any] = {}

    class Kept:
        def run(self, policy: str, name: str, send: Any) -> Run:
            send("")
            return run

    def drive(url: str, bodies: Any, arrivals_s: Any, **more: Any) -> list[Answer]:
        sent.update(bodies=bodies, **more)
        return []

    servers = SessionServers(Load(name="any"), TwoKinds(), Path(), 2.0)
    monkeypatch.setattr(session_servers, "drive", drive)
    monkeypatch.setattr(servers, "_kept", Kept())
    monkeypatch.setattr(servers, "_arm", Arm(policy="sage"))
    return sent, servers(Arm(policy="sage"), [SHARED, LONGER])


def test_a_server_is_told_what_the_simulator_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, seen = served(monkeypatch, Run([ANSWERED] * 2, {}, None, ""))
    first, second = sent["bodies"]
    assert len(second["input_ids"]) == 60
    assert second["input_ids"][:40] == first["input_ids"]
    said = {LENGTH_KEY: 9, "session": "one", "urgency": LS_URGENCY, "ttft_slo_ms": 9.0}
    assert first["sampling_params"]["custom_params"] == said
    assert first["priority"] == DEFAULT_URGENCY - LS_URGENCY
    assert (sent["follows"], sent["pauses_s"]) == ([None, 0], [0.0, 3.0])
    assert (seen.ttlt_s.tolist(), seen.cached_tokens) == ([2.0, 2.0], 14)


@pytest.mark.parametrize(
    "run", [Run([ANSWERED], {}, None, "late"), Run([Answer(0.0, error="no")], {}, None, "")]
)
def test_what_must_not_be_counted_gives_no_figure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError, match=r"late|no"):
        served(monkeypatch, run)
