"""Real SGLang servers on the CPU platform, with a small model and a store that holds little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.model import write_model
from tests.engine import plugins, stage
from tests.engine.serving import SageServer, warmed_store


@pytest.fixture(scope="package", autouse=True)
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every server here has the stage."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in plugins.install(
            tmp_path_factory.mktemp("stage"), stage.__name__
        ).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def sage_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageServer]:
    """A server under `sage` with one running request at a time and a warmed store."""
    folder = tmp_path_factory.mktemp("sage")
    store = warmed_store(folder / "store")
    with SageServer(
        model,
        folder,
        store,
        flags=["--max-running-requests", "1"],
        # What is tested is what was predicted, not how fast a busy machine predicts it.
        settings="[predictor]\ndeadline_ms = 30000.0\nmin_matches = 3\n",
    ) as server:
        yield server
