from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from patches.scheduler.host_memory import SHARE, free_bytes, pool_bytes

GIB = 2**30


def test_a_container_has_no_more_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(available=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    assert free_bytes(tmp_path) == 64 * GIB  # without control groups
    for limit, current, files, free in (
        ("max", 5, 0, 64 * GIB),
        (8 * GIB, 2 * GIB, 0, 6 * GIB),
        (5, 9, 0, 0),
        # Freshly read weights fill the container's file cache, which makes way.
        (8 * GIB, 8 * GIB, 3 * GIB, 6 * GIB),
    ):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{current}\n")
        stat = f"anon 7\nfile {3 * files}\ninactive_file {files}\nactive_file {files}\n"
        (tmp_path / "memory.stat").write_text(stat)
        assert free_bytes(tmp_path) == free


def test_the_ranks_of_a_host_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patches.scheduler.host_memory.free_bytes", lambda: 64 * GIB)
    sizes = {"tp_size": 8, "pp_size": 1, "dp_size": 2, "nnodes": 2}
    for enable_dp_attention, num_ranks in ((False, 8), (True, 4)):
        args = SimpleNamespace(**sizes, enable_dp_attention=enable_dp_attention)
        assert pool_bytes(args) == SHARE * 64 * GIB / num_ranks
