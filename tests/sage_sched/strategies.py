"""Hypothesis strategies for the core's nouns."""

from __future__ import annotations

from hypothesis import strategies as st

from sage_sched.config import COSTS, StepTimeConfig
from sage_sched.distribution import SOURCES, LengthDistribution
from sage_sched.step_time import ServerFacts

MAX_LENGTH = 5000
SERVER = ServerFacts(
    kv_pool_tokens=10_000,
    max_running_requests=32,
    step_time=StepTimeConfig().step_time(),
    swap_token_s=1e-5,
)


@st.composite
def distributions(draw: st.DrawFn, max_size: int = 40) -> LengthDistribution:
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=max_size))
    weights = draw(st.lists(st.floats(0.01, 10), min_size=len(lengths), max_size=len(lengths)))
    return LengthDistribution.from_samples(lengths, draw(st.sampled_from(SOURCES)), weights)


costs = st.sampled_from(COSTS)
