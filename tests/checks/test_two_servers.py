"""Two servers behind a router, but for the servers: what is typed, and what is counted."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from tests.checks import two_servers
from tests.checks.two_servers import (
    NotFollowedError,
    Shell,
    gauge,
    read_statuses,
    reason,
    unexplained,
)
from tests.engine.serving import wait_until

STATUSES = """\
1 100.5 200 0 whole
2 100.6 200 0 lost
3 107.0 503 0 lost
4 107.1 200 0 whole
"""


def test_the_example_has_all_steps() -> None:
    typed = two_servers.steps()
    assert len(typed) == 7
    for code in typed:
        subprocess.run(["bash", "-n", "-c", code], check=True)
    assert "30000" in typed[1]
    assert "kill -9" in typed[4]


def test_what_was_lost_is_told_from_what_ran_on_the_killed_one() -> None:
    asked = read_statuses(STATUSES)
    assert [each.number for each in asked if not each.is_whole] == [2, 3]
    assert unexplained(asked, killed_s=106.0) == [3]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ('{"error":{"message":"No available prefill workers"}}', "No available prefill workers"),
        ('data: {"text": "so far"}\n\ndata: {"error": "Decode server error"}\n\ndata: [DONE]\n\n',
         "Decode server error"),
        ('data: {"text": "so far"}\n\n', ""),
        ('{"text": "as if whole"}', ""),
        ('{"error": ', ""),
        ("", ""),
    ],
)  # fmt: skip
def test_what_a_client_is_told_of_an_answer_that_did_not_come(answer: str, told: str) -> None:
    assert reason(answer) == told


def test_what_is_typed_where_prefill_and_decode_are_apart() -> None:
    typed = two_servers.typed_apart("MODEL")
    subprocess.run(["bash", "-n", "-c", typed], check=True)
    assert "--disaggregation-mode prefill" in typed
    assert "--prefill http://127.0.0.1:30001 30011" in typed


def test_a_gauge_is_one_of_one_series() -> None:
    registry = CollectorRegistry()
    backlog = Gauge("sage:backlog_seconds", "Seconds.", ["rank"], registry=registry)
    backlog.labels(0).set(2.5)
    assert gauge(generate_latest(registry).decode()) == 2.5
    backlog.labels(1).set(1.0)
    for text in (generate_latest(registry).decode(), "sage:backlog_seconds 1.0\n", ""):
        with pytest.raises(ValueError, match="not one gauge"):
            gauge(text)


def test_a_shell_goes_on_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with Shell(tmp_path, dict(os.environ)) as shell:
        shell.types("sleep 1000 & one=$!")
        started = psutil.Process(int(shell.types("echo $one")))
        with pytest.raises(NotFollowedError, match="said before"):
            shell.types("echo said before; false")
        assert started.is_running()

    def is_gone() -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(started.status() == psutil.STATUS_ZOMBIE)
        return True

    wait_until(is_gone)
