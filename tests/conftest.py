from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bench.servers import server
from predictor_store.embedder import Embedder
from tests.nursery import Nursery

# No example fails for the time that it took.
settings.register_profile("any host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any host")
_SERVERS = Path(__file__).parent / "engine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _SERVERS in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def _servers_of_nursery(nursery: Nursery) -> Iterator[None]:
    """All servers that this process starts with SGLang's own command are born there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "launch", nursery.launch)
        yield


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
