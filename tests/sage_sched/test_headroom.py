from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sage_sched.headroom import FEWEST_STEPS, Headroom
from sage_sched.job import Job
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import IDLE, SERVER


def running(num_jobs: int, kv_tokens: int = 1000) -> SchedulerView:
    return replace(IDLE, running=[Job(i, kv_tokens, 4000, None, 0) for i in range(num_jobs)])


def steps(view: SchedulerView, swap_token_s: float = 1e-5) -> int:
    return Headroom.of(replace(view, server=replace(SERVER, swap_token_s=swap_token_s))).num_steps


def test_what_stands_empty_costs_as_much_as_the_departures_that_it_spares() -> None:
    view = running(4)
    found = steps(view)
    step_s = SERVER.step_time.decode_s(4, 4000)
    empty = 4 * found / 2 / SERVER.kv_pool_tokens
    moving = 2 * 1000 * 1e-5 / (found * step_s)
    assert abs(empty / moving - 1) < 0.1


def test_it_is_larger_where_a_departure_is_dearer() -> None:
    view = running(4)
    cheap, dear = steps(view, 5e-6), steps(view, 20e-6)
    assert FEWEST_STEPS < cheap < dear
    # KV is computed again only if host memory has no room or no request may be preempted. Moves may
    # take longer than that.
    full, stays = replace(view, host_free_tokens=999), replace(view, may_preempt=False)
    recomputed = steps(full)
    assert dear < recomputed < steps(view, 1.0)
    assert {steps(each, s) for each in (full, stays) for s in (1e-5, 1.0)} == {recomputed}


@given(st.integers(0, 300), st.integers(1, 9000), st.floats(0, 1), st.integers(0, 10_000))
def test_it_is_some_steps_and_no_more_than_half_the_pool(
    num_jobs: int, kv_tokens: int, swap_token_s: float, host_free_tokens: int
) -> None:
    view = replace(running(num_jobs, kv_tokens), host_free_tokens=host_free_tokens)
    found = steps(view, swap_token_s)
    assert found >= FEWEST_STEPS
    most = SERVER.kv_pool_tokens / 2
    assert found == FEWEST_STEPS or found * max(1, num_jobs) <= most


@given(st.integers(1, 200), st.sampled_from([1, 16, 64]), st.integers(1, 3000), st.integers(1, 300))
def test_tokens_set_aside(num_steps: int, page: int, held_tokens: int, left: int) -> None:
    one = Job(0, 10, 500 + left, None, 0, generated_tokens=500, held_tokens=held_tokens)
    (aside,) = Headroom(num_steps, page).set_aside_tokens([one])
    pages = {-(-tokens // page) for tokens in (held_tokens, held_tokens + min(num_steps, left))}
    assert aside == (max(pages) - min(pages)) * page


def test_no_more_is_kept_free_than_the_cap_leaves() -> None:
    headroom = Headroom(50, 1)
    assert headroom.left_tokens(Job(0, 10, 500, None, 0)) == 50
    assert headroom.left_tokens(Job(0, 10, 500, None, 0, generated_tokens=490)) == 10
    assert headroom.needed_tokens(Job(0, 10, 500, None, 0, generated_tokens=490)) == 500 + 10 + 1


def test_what_a_speculative_step_sets_aside_stays_free() -> None:
    view = replace(running(4), server=replace(SERVER, reserve_tokens=24, swap_token_s=0.0))
    headroom = Headroom.of(view)
    assert headroom.num_steps >= 24
    assert headroom.left_tokens(Job(0, 10, 500, None, 0, generated_tokens=499)) == 24
