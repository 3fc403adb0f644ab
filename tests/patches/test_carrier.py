from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.carrier import (
    came_at_s,
    clients_hints,
    decode,
    decode_hints,
    encode,
    encode_asked,
    encode_hints,
    strip,
)
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from tests.sage_sched.strategies import distributions


@given(distributions(), st.dictionaries(st.text(), st.booleans()))
def test_a_distribution_survives_the_way_to_the_scheduler(
    lengths: LengthDistribution, others: dict[str, bool]
) -> None:
    others = {key: value for key, value in others.items() if not key.startswith("__sage")}
    carried = {**others, **encode(lengths), "__sage_new": 1}
    assert decode(msgspec.msgpack.decode(msgspec.msgpack.encode(carried))) == lengths
    assert strip(carried) == others


GOOD = encode(LengthDistribution.from_samples([5, 9], "history"))


@pytest.mark.parametrize(
    "malformed",
    [
        {"__sage_lengths": "no"},
        {"__sage_lengths": [9, 5]},
        {"__sage_lengths": [0, 5]},
        {"__sage_lengths": []},
        {"__sage_lengths": [2**70, 2**71]},
        {"__sage_weights": [0.5]},
        {"__sage_weights": [-1.0, 2.0]},
        {"__sage_weights": ["a", "b"]},
        {"__sage_weights": None},
        {"__sage_effective_samples": -1},
        {"__sage_effective_samples": None},
        {"__sage_source": "me"},
        {"__sage_source": ["history"]},
    ],
)
def test_a_malformed_carrier_is_a_value_error(malformed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode({**GOOD, **malformed})
    incomplete = {key: value for key, value in GOOD.items() if key not in malformed}
    if "__sage_lengths" in incomplete:
        with pytest.raises(ValueError, match="malformed"):
            decode(incomplete)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 0.0),
        ("weight", None),
        ("weight", float("nan")),
        ("ttft_slo_ms", "soon"),
        ("ttft_slo_ms", 10**400),
        ("tpot_slo_ms", -1),
        ("urgency", True),
        ("urgency", 6),
        ("session", 3),
        ("session", "x" * 257),
    ],
)
def test_a_malformed_hint_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        decode_hints({f"__sage_hint_{field}": value})


def test_hints_come_as_they_went_and_what_was_not_given_is_not_carried() -> None:
    hints = Hints(
        weight=2.5, tpot_slo_ms=40, urgency=1, session="s", slo_class="high", first_token_weight=5.0
    )
    carried = encode_hints(hints)
    assert decode_hints(carried) == hints
    assert "__sage_hint_ttft_slo_ms" not in carried
    assert encode_hints(Hints()) == {}
    assert strip(carried) == {}
    # No client names its class.
    asked = {"slo_class": "high", "first_token_weight": 9.0, "weight": 2.0}
    assert clients_hints(asked) == Hints(weight=2.0)
    for nothing in (None, 3, "text", [1], {"other": 1}):
        assert (decode(nothing), decode_hints(nothing)) == (None, Hints())


@pytest.mark.parametrize(
    ("stamp", "came_s"),
    [
        (encode_asked("a", 90.0, 90.5), 90.0),
        (encode_asked("a", 100.0, 100.0), 100.0),
        # The clock has jumped, or it is not the same one.
        (encode_asked("a", 100.5, 100.5), 100.0),
        (encode_asked("a", 100.0 - 3600.0, 0.0), 100.0 - 3600.0),
        (encode_asked("a", 100.0 - 3601.0, 0.0), 100.0),
        (encode_asked("a", float("nan"), 0.0), 100.0),
        ({"__sage_asked": ["a", "early", 0.0]}, 100.0),
        ({"__sage_asked": ["a", 90.0, 90.5, "another host's"]}, 100.0),
        ({"__sage_asked": 3}, 100.0),
        *(({"__sage_asked": value}, 100.0) for value in (5, [], ["a", 1, 2])),
        ({}, 100.0),
        (None, 100.0),
    ],
)
def test_a_stamp_that_cannot_be_counts_as_now(stamp: object, came_s: float) -> None:
    assert came_at_s(stamp, now_s=100.0) == came_s
