from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches import carrier
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from tests.sage_sched.strategies import distributions

GOOD = carrier.encode(LengthDistribution.from_samples([5, 9], "history"))


@given(distributions(), st.dictionaries(st.text(), st.booleans()))
def test_a_distribution_survives_the_way_to_the_scheduler(
    lengths: LengthDistribution, others: dict[str, bool]
) -> None:
    others = {key: value for key, value in others.items() if not key.startswith("__sage")}
    carried = {**others, **carrier.encode(lengths), "__sage_new": 1}
    assert carrier.decode(msgspec.msgpack.decode(msgspec.msgpack.encode(carried))) == lengths
    assert carrier.strip(carried) == others


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lengths", ["no", [9, 5], [0, 5], [], [2**70, 2**71]]),
        ("weights", [[0.5], [-1.0, 2.0], ["a", "b"], None]),
        ("effective_samples", [-1, None]),
        ("source", ["me", ["history"]]),
    ],
)
def test_a_malformed_carrier_is_a_value_error(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=r".+"):
            carrier.decode({**GOOD, f"__sage_{field}": value})
    incomplete = {key: value for key, value in GOOD.items() if key != f"__sage_{field}"}
    if field == "lengths":
        assert carrier.decode(incomplete) is None
    else:
        with pytest.raises(ValueError, match="malformed"):
            carrier.decode(incomplete)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("weight", [0.0, None, float("nan")]), ("ttft_slo_ms", ["soon", 10**400]),
        ("tpot_slo_ms", [-1]), ("urgency", [True, 6]), ("session", [3, "x" * 257]),
    ],
)  # fmt: skip
def test_a_malformed_hint_is_named(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=field):
            carrier.decode_hints({f"__sage_hint_{field}": value})


def test_hints_come_as_they_went() -> None:
    given = {"weight": 2.5, "tpot_slo_ms": 40, "urgency": 1, "session": "s", "slo_class": "high",
             "first_token_weight": 5.0}  # fmt: skip
    carried = carrier.encode_hints(Hints(**given))
    assert carried == {f"__sage_hint_{name}": value for name, value in given.items()}
    assert (carrier.decode_hints(carried), carrier.encode_hints(Hints())) == (Hints(**given), {})
    # No client names its class.
    asked = {"slo_class": "high", "first_token_weight": 9.0, "weight": 2.0}
    assert carrier.clients_hints(asked) == Hints(weight=2.0)
    for nothing in (None, 3, "text", [1], {"other": 1}):
        assert (carrier.decode(nothing), carrier.decode_hints(nothing)) == (None, Hints())
        assert carrier.decode_asked(nothing) is None


def test_ids_are_short_and_as_different_as_before() -> None:
    ids = ["a" * 128, "a" * 129, "a" * 130, "b" * 129]
    found = [carrier.decode_asked(carrier.encode_asked(rid, 1.0, 2.0)) for rid in ids]
    assert found == [(carrier.short_id(rid), 1.0, 2.0) for rid in ids]
    assert [carrier.short_id(rid)[:128] for rid in ids] == [rid[:128] for rid in ids]
    assert [len(carrier.short_id(rid)) for rid in ids] == [128, *[152] * 3]
    assert len({carrier.short_id(rid) for rid in ids}) == 4


@pytest.mark.parametrize(
    ("stamp", "came_s"),
    [
        *((carrier.encode_asked("a", came_s, came_s), came_s) for came_s in (90.0, 100.0, -3500.0)),
        # The clock has jumped, or is another one.
        *(
            (carrier.encode_asked("a", came_s, 0.0), 100.0)
            for came_s in (100.5, -3501.0, float("nan"))
        ),
        ({"__sage_asked": ["a", 90.0, 90.5, "another host's"]}, 100.0),
        *(({"__sage_asked": value}, 100.0) for value in (3, [], ["a", 1, 2], ["a", "early", 0.0])),
        *((nothing, 100.0) for nothing in ({}, None)),
    ],
)
def test_a_stamp_that_cannot_be_counts_as_now(stamp: object, came_s: float) -> None:
    assert carrier.came_at_s(stamp, now_s=100.0) == came_s
