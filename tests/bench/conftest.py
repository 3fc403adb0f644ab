from __future__ import annotations

from pathlib import Path

import pytest

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import CPU_MODEL


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", **CPU_MODEL)
