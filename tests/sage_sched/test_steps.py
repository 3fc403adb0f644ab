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


@given(servers(), st.integers(1, 300), st.data())
def test_cached_tokens_save_time(server: ServerFacts, kv_tokens: int, data: st.DataObject) -> None:
    cached = data.draw(st.integers(0, kv_tokens))
    assert server.recompute_s(kv_tokens, cached) <= server.recompute_s(kv_tokens) * (1 + 1e-9)
