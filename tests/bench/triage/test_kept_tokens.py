"""How much of an evicted request's KV the paper would keep, against all that could be kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.triage.kept_tokens import DecodedAgain


@given(
    st.floats(1e-5, 0.1), st.floats(1e-9, 1e-4), st.floats(1e-5, 0.1),
    st.integers(1, 600), st.integers(1, 300),
)  # fmt: skip
def test_the_corrected_equation_is_the_least_of_what_it_is_derived_from(
    load_s: float, kv_token_s: float, step_s: float, input_tokens: int, decoded_tokens: int
) -> None:
    costs = DecodedAgain(load_s, kv_token_s, step_s)

    def resume_s(kept: float) -> float:
        return costs.resume_s(input_tokens, decoded_tokens, kept)

    best_s = min(map(resume_s, range(decoded_tokens + 1)))
    kept = costs.kept_tokens(input_tokens, decoded_tokens)
    assert 0 <= kept <= decoded_tokens
    assert resume_s(kept) <= best_s * (1 + 1e-9)


def test_the_printed_equation_is_not() -> None:
    costs = DecodedAgain(load_s=2.405e-2, kv_token_s=1e-4, step_s=1e-2)
    best = min(range(101), key=lambda kept: costs.resume_s(100, 100, kept))
    assert best == 60
    assert costs.kept_tokens(100, 100) == pytest.approx(best, abs=0.5)
    assert costs.kept_as_printed(100) == pytest.approx(20, abs=0.5)
    assert costs.resume_s(100, 100, 20) > 1.03 * costs.resume_s(100, 100, best)
