from __future__ import annotations

from pathlib import Path

import pytest

from bench.compare import CPU_MODEL
from bench.model import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", **CPU_MODEL)
