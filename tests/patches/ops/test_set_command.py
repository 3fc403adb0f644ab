"""`sage-sched set` where no server is, or none that it could be."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from patches.ops.set_command import changes_of
from sage_sched.cli import main


@pytest.fixture
def unserved() -> Iterator[str]:
    """Host and port, which nobody else gets and nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_where_no_server_answers_its_address_is_said(
    scheme: str, unserved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", "--url", scheme + unserved, "schedule_policy=fcfs"]) == 1
    said = f"sage-sched set: no server answers at http://{unserved}: [Errno 111] Connection refused"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("url", ["ftp://localhost", "http://", "http://host:port", ""])
def test_what_is_no_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["set", "--url", url])
    assert "is no address of a server, as localhost:30000" in capsys.readouterr().err


def test_names_with_dots_are_sections() -> None:
    changes = changes_of(["schedule_policy=ssjf", "policy.sage.regret=4", "a.b=x=y"])
    assert changes == {
        "schedule_policy": "ssjf", "policy": {"sage": {"regret": 4}}, "a": {"b": "x=y"},
    }  # fmt: skip
    for wrong in ("sage", "=1", "a..b=1"):
        with pytest.raises(ValueError, match="is no NAME=VALUE"):
            changes_of([wrong])
    for again in ("decode.max_gap_ms=3", "decode=4", "decode.max_gap_ms.x=5"):
        with pytest.raises(ValueError, match=again.partition("=")[0] + " has a value already"):
            changes_of(["decode.max_gap_ms=2", again])
