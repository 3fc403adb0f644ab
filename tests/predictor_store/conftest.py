from __future__ import annotations

import pytest

from predictor_store.embedder import Embedder


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder(num_threads=1)
