"""Real SGLang servers on the CPU platform, with a small model and a small store.

kinds.py has the servers that tests share. Tests of one kind, or else of one file, follow one
another in one worker.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.engines.server import plugins
from bench.engines.server.model import write_model
from bench.engines.server.server import Server
from tests.checks.exactness import Spoken, ask, crowd
from tests.engine import kinds, stage
from tests.engine.serving import CHECKED, CPU_FLAGS, SageServer, states

ASKED = crowd(36)
Stock = list[Spoken]
# SGLang's own policy that orders by prompt length, then by arrival.
POLICY = "shortest-prefill-first"
_HERE = Path(__file__).parent
# The shared server that runs, if any, by its kind.
_SHARED = pytest.StashKey[dict[str, SageServer]]()
# The slowest kinds of servers, and files, come first.
_ORDER = (
    "test_installed", "two_ranks", "test_fuzz", "test_learning", "yielding", "paged",
    "replicas", "foreseeing", "several",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server go to one worker, one after the other."""
    groups = {item: group_of(item) for item in items if item.path.parent == _HERE}
    for item, name in groups.items():
        item.add_marker(pytest.mark.xdist_group(name))

    def place(item: pytest.Item) -> tuple[int, str]:
        name = groups.get(item, "")
        return (_ORDER.index(name) if name in _ORDER else len(_ORDER)), name

    items.sort(key=place)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a shared server with its last test: replicas, at least, take a core while idle."""
    if nextitem is None or group_of(nextitem) != group_of(item):
        running = item.session.stash.get(_SHARED, {})
        while running:
            running.popitem()[1].kill()


def group_of(item: pytest.Item) -> str:
    """The kind of its shared server, or its file."""
    assert isinstance(item, pytest.Function)
    shared = [name for name in item.fixturenames if name in kinds.KINDS]
    return shared[0] if shared else item.path.stem


@pytest.fixture(scope="package", autouse=True)
def _staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every server here has the stage, and learns its step times anew."""
    env = plugins.install(tmp_path_factory.mktemp("stage"), stage.__name__)
    env |= {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="package")
def stock(_staged: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """The answers to ASKED of a stock server with the plugin installed. One worker asks for all
    workers."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "stock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = shared / "stock.pickle"
        if not kept.exists():
            flags = [*CPU_FLAGS, "--schedule-policy", POLICY]
            log = tmp_path_factory.mktemp("stock") / "server.log"
            with Server(model, flags, log=log, env=CHECKED) as server:
                found = ask(server, ASKED, 12)
                assert "sage" not in states(server)[0]
            assert [len(answer.ids) for answer in found] == [tokens for _, tokens in ASKED]
            kept.write_bytes(pickle.dumps(found))
    known: Stock = pickle.loads(kept.read_bytes())
    return known


def _shared(name: str) -> Any:
    """Return a fixture with the server of that kind, or a new one if a test has ended it."""

    @pytest.fixture(name=name)
    def server(
        _staged: None,
        model: Path,
        tmp_path_factory: pytest.TempPathFactory,
        request: pytest.FixtureRequest,
    ) -> SageServer:
        running = request.session.stash.setdefault(_SHARED, {})
        if name not in running or not running[name].running():
            folder = tmp_path_factory.mktemp(name)
            running[name] = kinds.server_of(name, model, folder).__enter__()
        return running[name]

    return server


# pytest finds fixtures by the names that a module has.
globals().update({name: _shared(name) for name in kinds.KINDS})
