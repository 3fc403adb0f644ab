"""The work of the latest arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from sage_sched.overload.arrivals import Arrivals
from sage_sched.overload.work import column_of
from sage_sched.steps import StepTime
from tests.sage_sched.strategies import SERVER, job, named


@pytest.mark.parametrize(("num", "first"), [(1, 0), (100, 50), (512, 50), (1500, 988)])
def test_each_period_has_the_work_that_came_since_it_began(num: int, first: int) -> None:
    policy, arrivals = named("fcfs-fill"), Arrivals()
    for number in range(num):
        if number == 50:
            arrivals.clear()
        one = job(number, lengths=(5 + number % 300,))
        arrivals.add(column_of(one, policy, SERVER.step_time, float(number)), number)
    assert arrivals.numbers.tolist() == [*range(first, num)]
    places = arrivals.periods()
    steps = [sum(5 + number % 300 for number in range(first + at, num)) for at in places]
    for step_time in (SERVER.step_time, StepTime(0, 0, 1.0, 0, 0, 0, 0)):
        arrivals.revise(0.0, step_time)
        prompt_s = step_time.prompt_s(0, 10)
        since, counts = arrivals.since(places), num - first - places
        assert np.array(since[:3]) == pytest.approx(np.array([prompt_s * counts, counts, steps]))
