"""`make lock`, without an index."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import lock

OLD, CPU, NEW = (digit * 64 for digit in "012")


def test_a_hash_stays_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(f"# Why.\ntorch==2.1 --hash=sha256:{CPU}\na_b==1 --hash=sha256:{OLD}\n")
    asked = []

    def hashes(pins: list[str], python: str, public: bool) -> dict[str, str]:
        asked.append((pins, python, public))
        return {"torch": NEW, "a-b": NEW}

    monkeypatch.setattr(lock, "installed", lambda: ["a_b==2", "torch==2.1"])
    monkeypatch.setattr(lock, "hashes", hashes)
    assert lock.main([str(file)]) == 0
    assert file.read_text().splitlines() == [
        "# Why.",
        f"a_b==2 --hash=sha256:{NEW}",
        f"torch==2.1 --hash=sha256:{CPU} --hash=sha256:{NEW}",
    ]
    assert {python for _, python, public in asked if public} == {"3.11", "3.12"}
    assert not all(public for *_, public in asked)
