"""Hypothesis strategies for the core's nouns."""

from __future__ import annotations

from hypothesis import strategies as st

from sage_sched.config import COSTS
from sage_sched.distribution import SOURCES, LengthDistribution

MAX_LENGTH = 5000


@st.composite
def distributions(draw: st.DrawFn, max_size: int = 40) -> LengthDistribution:
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=max_size))
    weights = draw(st.lists(st.floats(0.01, 10), min_size=len(lengths), max_size=len(lengths)))
    return LengthDistribution.from_samples(lengths, draw(st.sampled_from(SOURCES)), weights)


costs = st.sampled_from(COSTS)
