from __future__ import annotations

import numpy as np
import pytest

from predictor_store.predict.asked import (
    NEW_SESSION,
    NUM_FEATURES,
    NUM_RECENT,
    OWN,
    SHAPED,
    STOPPED,
    Asked,
    Scope,
    Session,
    kinds_of,
)  # fmt: skip


@pytest.mark.parametrize("end", [OWN, STOPPED, SHAPED])
def test_a_scope_is_read_from_its_name(end: str) -> None:
    for scope in (Scope("adapter"), Scope("an\nadapter", "of this kind", end)):
        assert Scope.read(scope.name) == scope
        assert Scope.read(scope.name[:-3]) == scope._replace(adapter=scope.adapter[:-3])
        # Only an answer's own ends become ends by limits.
        is_stopped = scope.limits and end != SHAPED
        assert scope.stopped() == scope._replace(end=STOPPED if is_stopped else scope.end)


TWO_ANSWERS = Session(2, (8, 64), 100)
ALL_FIELDS = Asked(1, -1, 3, -1, True, 7, 120, 500, 2, "Be brief.", "a conversation")
SIGNS = [-0.5, -0.5, 0.5, 0.5, 0.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("of", "session", "expected"),
    [
        (Asked(), NEW_SESSION, [0.0] * NUM_FEATURES),
        (Asked(num_tools=-1, num_turns=-1, input_tokens=-1, max_tokens=-1), NEW_SESSION,
         [0.0] * NUM_FEATURES),
        (Asked(effort=1, input_tokens=6, system="Be brief."), NEW_SESSION,
         [0, 1, *[0] * 10, 0.649, 0, 0, 0, *SIGNS]),
        (ALL_FIELDS, TWO_ANSWERS,
         [1, -1, 1, -1, 1, 1, 0.549, 1.04, 1.386, 1.015, 0.693, 1.04, 1.599, 1, 2.072, 1, *SIGNS]),
    ],
)  # fmt: skip
def test_features_are_as_stores_have_them(
    of: Asked, session: Session, expected: list[float]
) -> None:
    assert of.features(session) == pytest.approx(expected, abs=1e-3)
    assert of.features(session).dtype == np.float32


def test_a_session_is_known_by_its_last_uncut_answers() -> None:
    session = NEW_SESSION
    for length in [50] * 100 + [0] * 30:
        session = session.after(100, length)
    assert session.after(320, 1, cut=True) == Session(131, (1,) * NUM_RECENT, 321)


def test_modes_of_a_prompt_are_kinds_apart() -> None:
    kinds = [
        Asked(), Asked(thinks=1), Asked(thinks=-1), Asked(effort=1), Asked(num_tools=5),
        Asked(num_tools=5, tool_choice=1), Asked(is_constrained=True),
    ]  # fmt: skip
    numbers = kinds_of(np.stack([each.features() for each in kinds]))
    assert np.unique(numbers).size == len(kinds)
