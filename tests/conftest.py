from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bench.engines.server import server
from predictor_store.predict.embedder import Embedder
from tests.nursery import Nursery

# No example fails because of its time.
settings.register_profile("any host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any host")
_ROOT = Path(__file__).parent
_SERVERS = _ROOT / "engine"
_RANK = {"long": 0, "server": 0, "slow": 1}
_NURSERY = pytest.StashKey[Nursery]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NURSERY] = Nursery()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_NURSERY].close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with servers come first. One worker gets all tests of a file, or of a server."""
    for item in items:
        if _SERVERS in item.path.parents:
            item.add_marker(pytest.mark.server)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(_ROOT))))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    return min((_RANK.get(mark.name, 2) for mark in item.iter_markers()), default=2)


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)
def pytest_groups_told(items: list[pytest.Item]) -> None:
    """Restore the group that pytest-xdist 3.8 adds to a name, which pytest 9.2 ignores."""
    for item in items:
        if (with_group := vars(item).get("_nodeid")) is not None:
            item._id = type(item._id).parse(with_group)
            assert item.nodeid == with_group


@pytest.fixture(scope="session")
def nursery(pytestconfig: pytest.Config) -> Nursery:
    return pytestconfig.stash[_NURSERY]


@pytest.fixture(scope="session", autouse=True)
def _servers_of_nursery(nursery: Nursery) -> Iterator[None]:
    """The nursery starts all servers that this process runs by SGLang's own command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "launch", nursery.launch)
        yield


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder(num_threads=1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The optional folder of real data next to the checkout."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the optional data folder {folder}")
    return folder
