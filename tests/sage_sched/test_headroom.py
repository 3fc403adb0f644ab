from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.headroom import FEWEST_STEPS, Headroom
from sage_sched.job import Job
from sage_sched.view import SchedulerView
from tests.sage_sched.situations import view_of
from tests.sage_sched.strategies import SERVER

FOUR = "run 0:1000<4000 1:1000<4000 2:1000<4000 3:1000<4000"


def steps(view: SchedulerView, swap_token_s: float = 1e-5) -> int:
    return Headroom.of(replace(view, server=replace(SERVER, swap_token_s=swap_token_s))).num_steps


def test_headroom_costs_as_much_as_the_departures_that_it_saves() -> None:
    found = steps(view_of(FOUR))
    step_s = SERVER.step_time.decode_s(4, 4000)
    empty = 4 * found / 2 / SERVER.kv_pool_tokens
    moving = 2 * 1000 * 1e-5 / (found * step_s)
    assert abs(empty / moving - 1) < 0.1
    assert steps(view_of(FOUR), swap_token_s=1.0) == SERVER.kv_pool_tokens // 8  # half of the pool


@pytest.mark.parametrize(
    ("drafts", "age", "left_tokens"), [(1, 0, 50), (1, 490, 10), (24, 499, 24)]
)
def test_memory_kept_free_for_an_answer(drafts: int, age: int, left_tokens: int) -> None:
    """It is at most the rest of its cap, and at least the tokens that a speculative step sets
    aside."""
    one, headroom = Job(0, 10, 500, None, 0, generated_tokens=age), Headroom(50, 16, 10**6, drafts)
    assert headroom.left_tokens(one) == left_tokens
    assert headroom.needed_tokens(one) == 10 + age + left_tokens + 16
    view = view_of(f"{FOUR}; drafts {drafts}; move 0")
    assert Headroom.of(view).num_steps == max(drafts, FEWEST_STEPS)


@given(st.integers(1, 200), st.sampled_from([1, 16, 64]), st.integers(1, 3000), st.integers(1, 300))
def test_tokens_set_aside(num_steps: int, page: int, held_tokens: int, left: int) -> None:
    one = Job(0, 10, 500 + left, None, 0, generated_tokens=500, held_tokens=held_tokens)
    (aside,) = Headroom(num_steps, page, 10**6).set_aside_tokens([one])
    pages = {-(-tokens // page) for tokens in (held_tokens, held_tokens + min(num_steps, left))}
    assert aside == (max(pages) - min(pages)) * page
