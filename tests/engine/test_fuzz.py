"""A short slice of the fuzzer (`python -m tests.engine.fuzz`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.engine.fuzz.configurations import CONFIGURATIONS
from tests.engine.fuzz.judge import Oracle
from tests.engine.fuzz.model import write_spelling_model
from tests.engine.fuzz.trial import Trial, calm_server

# Those of one slice share an undisturbed server.
SLICES = (("documents", "sage"), ("fickle",))


@pytest.fixture(scope="module")
def spelling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spelling_model(tmp_path_factory.mktemp("spelling"))


@pytest.mark.parametrize(
    "names", [SLICES[0], pytest.param(SLICES[1], marks=pytest.mark.long)], ids="-".join
)
def test_nothing_is_found(names: Sequence[str], spelling_model: Path, tmp_path: Path) -> None:
    with closing(Oracle(calm_server(CONFIGURATIONS[names[0]], spelling_model, tmp_path))) as oracle:
        for name in names:
            with Trial(CONFIGURATIONS[name], spelling_model, tmp_path, oracle) as trial:
                assert trial.episode(f"slice/{name}") == []
            assert trial.counts["compared"] > 0
