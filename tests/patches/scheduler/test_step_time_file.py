from __future__ import annotations

import re
from pathlib import Path

import pytest

from patches.scheduler.step_time_file import StepTimeFile
from sage_sched.steps import StepTime

SERVER = {"model": "a model", "hardware": "a GPU"}
LEARNED = StepTime(0.004, 0.002, 1.5e-4, 2e-8, 0.013, 3e-4, 1e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sage-sched"


def written() -> StepTimeFile:
    file = StepTimeFile(SERVER)
    file.write(LEARNED)
    return file


def test_a_server_of_the_same_kind_begins_with_it(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written()
    assert StepTimeFile(dict(SERVER)).read() == LEARNED
    assert file.path.parent == cache
    other = StepTimeFile(SERVER | {"hardware": "another GPU"})
    assert other.read() is None
    assert not caplog.records
    file.path.rename(other.path)  # as if by hand
    assert other.read() is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
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
    path.write_text(damage(path.read_text()), encoding="latin-1")
    assert StepTimeFile(SERVER).read() is None
    assert len(caplog.records) == 1


def test_a_full_disk_costs_one_log_line(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    written().write(LEARNED)
    assert len(caplog.records) == 1
