from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from sage_sched.steps import ServerFacts, StepTime

coefficients = st.floats(0, 1, allow_subnormal=False)


@st.composite
def servers(draw: st.DrawFn) -> ServerFacts:
    step_time = StepTime(*(draw(coefficients) for _ in fields(StepTime)))
    return ServerFacts(10_000, 32, step_time, draw(coefficients))


def kept_in_part_s(server: ServerFacts, kv_tokens: int, saved_tokens: int) -> float:
    """Seconds to save the first tokens of a sequence and to recompute the rest."""
    rest_s = server.recompute_s(kv_tokens, saved_tokens) if saved_tokens < kv_tokens else 0.0
    return server.swap_s(saved_tokens) + rest_s


@given(servers(), st.integers(1, 300))
def test_saving_part_of_the_kv_is_never_cheaper(server: ServerFacts, kv_tokens: int) -> None:
    # Semantic scheduling's equations (3) to (6) look for the best part; their (6) is no minimum.
    best = min(kept_in_part_s(server, kv_tokens, n) for n in range(kv_tokens + 1))
    all_or_nothing = min(server.swap_s(kv_tokens), server.recompute_s(kv_tokens))
    assert all_or_nothing <= best * (1 + 1e-9)


@given(servers(), st.integers(1, 300), st.data())
def test_cached_tokens_save_time(server: ServerFacts, kv_tokens: int, data: st.DataObject) -> None:
    cached = data.draw(st.integers(0, kv_tokens))
    assert server.recompute_s(kv_tokens, cached) <= server.recompute_s(kv_tokens) * (1 + 1e-9)
