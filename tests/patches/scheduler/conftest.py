from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang.srt.runtime_context import get_parallel

from tests.patches.schedulers import Server


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    ranks = {"attn_tp_rank": 0, "attn_cp_rank": 0, "attn_dcp_rank": 0, "attn_dcp_size": 1}
    with get_parallel().override(**ranks, dp_rank=None, tp_rank=0):
        yield


@pytest.fixture
def server() -> Server:
    """Return a server under sage on which no request can leave the device."""
    return Server()
