from __future__ import annotations

from pathlib import Path

import pytest

from predictor_store.embedder import Embedder


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder(num_threads=1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The optional folder of real data beside the checkout."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the optional data folder {folder}")
    return folder
