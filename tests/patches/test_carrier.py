from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.carrier import decode, encode, strip
from sage_sched.distribution import LengthDistribution
from tests.sage_sched.strategies import distributions


@given(distributions())
def test_a_distribution_survives_the_way_to_the_scheduler(lengths: LengthDistribution) -> None:
    packed = msgspec.msgpack.encode({"client_key": 1, **encode(lengths)})
    assert decode(msgspec.msgpack.decode(packed)) == lengths


def test_the_carrier_is_flat_enough_for_sglang() -> None:
    # sglang/srt/sampling/sampling_params.py: a list in a dict, or a list of lists, fails to decode.
    values = encode(LengthDistribution.from_samples([1, 2, 3], "history")).values()
    for value in values:
        items = value if isinstance(value, list) else [value]
        assert all(isinstance(item, int | float | str) for item in items)


@given(distributions(), st.dictionaries(st.text(), st.integers()))
def test_reserved_keys_are_stripped_and_the_others_kept(
    lengths: LengthDistribution, others: dict[str, int]
) -> None:
    others = {key: value for key, value in others.items() if not key.startswith("__sage")}
    assert strip({**others, **encode(lengths), "__sage_new": 1}) == others


@pytest.mark.parametrize("value", [None, 3, "text", [1]])
def test_what_is_no_mapping_is_left_to_sglang(value: object) -> None:
    assert strip(value) == value
    assert decode(value) is None


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
def test_a_malformed_carrier_is_an_error_that_the_scheduler_expects(
    malformed: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode({**GOOD, **malformed})
    incomplete = {key: value for key, value in GOOD.items() if key not in malformed}
    if "__sage_lengths" in incomplete:
        with pytest.raises(ValueError, match="malformed"):
            decode(incomplete)
