"""The shared servers (kinds.py), one at a time in each worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.serving import SageServer

Kind = Callable[[Path, Path], SageServer]


class Pool:
    """Tests of one kind follow one another (conftest.py), so that each kind is started once."""

    def __init__(self, model: Path, factory: pytest.TempPathFactory) -> None:
        self._model, self._factory = model, factory
        self._kind: Kind | None = None
        self._server: SageServer | None = None

    def get(self, kind: Kind) -> SageServer:
        """The one of this kind; another one if a test has ended it."""
        if self._server is None or kind is not self._kind or not self._server.running():
            self.drop()
            folder = self._factory.mktemp(kind.__name__)
            self._kind, self._server = kind, kind(self._model, folder).__enter__()
        return self._server

    def drop(self) -> None:
        """End it; harmless where there is none."""
        if self._server is not None:
            self._server.kill()
            self._server = None
