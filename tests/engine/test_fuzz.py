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


@pytest.mark.parametrize(
    "names",
    [("documents", "sage"), pytest.param(("fickle",), marks=pytest.mark.long)],
    ids="-".join,
)
def test_nothing_is_found(names: Sequence[str], tmp_path: Path) -> None:
    """The configurations share an undisturbed server."""
    model = write_spelling_model(tmp_path / "model")
    with closing(Oracle(calm_server(CONFIGURATIONS[names[0]], model, tmp_path))) as oracle:
        for name in names:
            with Trial(CONFIGURATIONS[name], model, tmp_path, oracle) as trial:
                assert trial.episode(f"slice/{name}") == []
            assert trial.counts["compared"] > 0
