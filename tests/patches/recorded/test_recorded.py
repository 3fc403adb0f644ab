"""No decision of a server, and nothing that its operator sees, changes unnoticed."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version

import pytest

from tests.nursery import Nursery
from tests.patches.recorded.__main__ import RECORDED, digests, records

_RELEASE = "0.5.23"


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info >= (3, 12) or platform.machine() != "x86_64" or version("sglang") != _RELEASE,
    reason=f"recorded with SGLang {_RELEASE} and Python 3.11 on x86: others decide otherwise",
)
def test_servers_do_as_recorded(nursery: Nursery) -> None:
    known = json.loads(RECORDED.read_text())
    now = {name: digests(kinds) for name, kinds in records(nursery, [*known]).items()}
    differ = {
        name: [kind for kind, digest in kinds.items() if now[name].get(kind) != digest]
        for name, kinds in known.items()
        if now[name] != kinds
    }
    assert not differ, "`python -m tests.patches.recorded NAME` shows what a situation is like now"
