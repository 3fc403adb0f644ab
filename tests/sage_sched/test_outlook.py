from __future__ import annotations

import numpy as np
import pytest

from sage_sched.outlook import Those, gains_steps


def those(*jobs: tuple[float, float, float], held: float = 1.0) -> Those:
    """Of each its place, its steps to go and its index."""
    places, steps, indices = np.array(jobs, np.float64).reshape(-1, 3).T
    return Those(places, steps, np.full(len(jobs), held), indices)


def test_on_one_slot_it_is_the_rule_of_gittins() -> None:
    waiting = those((1, 100, 20), (2, 100, 40))
    # Both wait for each other's 100 steps, with a mean index of 30.
    for index, gain in ((60.0, 200.0), (30.0, 0.0), (15.0, -100.0)):
        found = gains_steps(waiting, those((3, 500, index)))
        assert found == pytest.approx([gain], abs=1.0)


def test_nobody_gains_where_nobody_is_ahead() -> None:
    running = those((1, 500, 60), (9, 500, 60))
    assert gains_steps(those((5, 100, 20)), running)[0] == 0.0
    assert gains_steps(those(), running).tolist() == [0.0, 0.0]


def test_it_is_worth_less_where_room_frees_by_itself() -> None:
    waiting = those(*((place, 100, 20) for place in range(10)))
    costly = (99, 1000, 200)

    def gain(left_steps: float) -> float:
        others = ((-1, left_steps, 20) for _ in range(30))
        return float(gains_steps(waiting, those(costly, *others))[0])

    assert 0 < gain(100) < gain(1000)


def test_what_frees_more_room_is_worth_more() -> None:
    waiting = those(*((place, 100, 20) for place in range(10)))
    running = those(*((99, 200, 40) for _ in range(20)))
    held = np.ones(20)
    held[0] = 3.0
    gains = gains_steps(waiting, running._replace(held=held))
    assert gains[0] > gains[1]
