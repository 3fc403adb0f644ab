from __future__ import annotations

import re
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from patches.messages import StepTimes
from patches.scheduler.calibration import Calibration
from patches.scheduler.step_time_file import StepTimeFile, kind_of
from sage_sched.app.config import StepTimeConfig
from sage_sched.steps import StepTime
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import make_bare_scheduler
from tests.sage_sched.step_traffic import steps

KIND = {"model": "a model", "hardware": "a GPU"}
SHIPPED = StepTimeConfig().step_time()
TRUTH = StepTime(0.004, 0.002, 1.5e-4, 2e-8, 0.013, 3e-4, 1e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sage-sched"


def made() -> Calibration:
    return Calibration(None, StepTimeFile(KIND), 72_000, 64, "cpu")


def run(
    calibration: Calibration, step_time: StepTime, num_steps: int, noise: float = 0.05
) -> list[StepTimes]:
    """Run steps of a server with these step times. Return rank 0's messages, which all ranks
    get."""
    told = []
    for work, seconds in islice(steps(step_time, 0, rate=8.0, noise=noise), num_steps):
        calibration._learner.add(work, seconds)
        if (news := calibration.polled()) is not None:
            calibration.updated(news)
            told.append(news)
    return told


def test_it_is_said_again_until_it_has_come_back() -> None:
    # A rank that skips a round of the broadcast drops its messages.
    calibration, taken, news = made(), steps(TRUTH, 0, rate=8.0), None
    while news is None:
        calibration._learner.add(*next(taken))
        news = calibration.polled()
    assert calibration.polled() is news
    assert (calibration.step_time, calibration.source) == (SHIPPED, "shipped")
    calibration.updated(news)
    assert calibration.polled() is None


def test_the_next_server_begins_with_times_learned_from_many_steps() -> None:
    first = made()
    assert run(first, TRUTH, 900)
    assert made().polled() is None
    run(first, TRUTH, 300)
    second = made()
    kept = second.polled()
    assert kept is not None
    second.updated(kept)
    assert second.source == "kept"
    assert second.step_time.decode_s(32, 32_768) == pytest.approx(TRUTH.decode_s(32, 32_768), 0.05)
    assert len(run(second, TRUTH, 2000)) <= 3


def test_a_server_as_shipped_says_once_that_it_has_learned() -> None:
    """It refuses nothing before that."""
    calibration = made()
    assert len(run(calibration, SHIPPED, 2000, noise=0.0)) == 1
    assert (calibration.step_time, calibration.source) == (SHIPPED, "learned")


def test_learning_that_fails_costs_the_learning_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sage_sched.step_learner.fit", fail)
    calibration = made()
    assert run(calibration, TRUTH, 1000) == []
    assert calibration.step_time == SHIPPED
    assert len(caplog.records) == 1


def written() -> StepTimeFile:
    file = StepTimeFile(KIND)
    file.write(TRUTH)
    return file


def test_other_hardware_or_flags_are_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [kind_of(make_bare_scheduler(tp_size=size)) for size in (1, 1, 2)]
    for name in ("a GPU", "another GPU"):
        device = SimpleNamespace(get_device_name=partial(str, name))
        monkeypatch.setattr(torch, "get_device_module", lambda _, device=device: device)
        found.append(kind_of(make_bare_scheduler()))
    assert found[0] == found[1]
    assert len({*map(str, found)}) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("a model", "another"),  # renamed by hand
        lambda text: text.replace("decode_base_ms", "decode_bass_ms"),
        lambda text: text.replace("13.0", "-13.0"),
        lambda text: text.replace("13.0", "NaN"),
        lambda text: re.sub(r'(decode_\w+": )[\d.e-]+', r"\g<1>0.0", text),
        lambda text: text.replace("13.0", '"13"'),
        lambda text: "[" * 60_000,
        lambda text: " " * 70_000 + text,
        lambda text: "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
def test_a_damaged_file_is_ignored(damage, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    path = written().path
    assert (StepTimeFile(dict(KIND)).read(), caplog.records) == (TRUTH, [])
    path.write_text(damage(path.read_text()), encoding="latin-1")
    assert StepTimeFile(KIND).read() is None
    assert len(caplog.records) == 1


def test_a_full_disk_costs_one_log_line(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    written().write(TRUTH)
    assert len(caplog.records) == 1
