from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.load_snapshot import LoadSnapshot

from patches.loads import read_outlooks, with_outlook

OUTLOOK = {"ttft_ms": 5, "late": 0}


def test_a_section_of_ours_passes_through_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_snapshot, "snapshot_decoder", load_snapshot.snapshot_decoder)
    writer = load_snapshot.ShmLoadSnapshotWriter(str(tmp_path / "loads"), 1, 0)
    reader = load_snapshot.ShmLoadSnapshotReader(str(tmp_path / "loads"), 1)
    load = LoadSnapshot(timestamp=1.0, num_running_reqs=3)
    writer.write(with_outlook(load, OUTLOOK))
    assert reader.read(0) == load  # a process of SGLang's that does not know it
    read_outlooks()
    found = reader.read(0)
    assert found is not None
    for include, theirs in ((None, None), ({"all"}, {"all"}), ({"sage"}, {"core"})):
        assert found.to_dict(include) == {**load.to_dict(theirs), "sage": OUTLOOK}
    assert "sage" not in found.to_dict({"core"})
    writer.write(with_outlook(load, None))
    found = reader.read(0)
    assert found is not None
    assert found.to_dict() == load.to_dict()
