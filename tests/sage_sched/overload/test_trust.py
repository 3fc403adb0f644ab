from __future__ import annotations

import pytest

from sage_sched.overload.trust import AGAIN, LEAST, NUM_COMPARED
from tests.sage_sched.overload.test_overload import Door


def answered(door: Door, ratio: float, number: int = NUM_COMPARED, *, was_sampled: bool) -> None:
    """Add answers of ten tokens that take this share of their predicted times."""
    for _ in range(number):
        job, _, _ = door.ask(10, may_refuse=False)
        job.grow(10)
        came_s, door.now_s = door.now_s, door.now_s + ratio
        job.arrival_s = came_s
        door.overload.answered(job, 1.0, door.now_s, was_sampled=was_sampled)
        door.core.now_s = door.now_s
        door.core.ended(job)


def refuses(door: Door) -> bool:
    return any(door.ask(4000)[2] is not None for _ in range(400))


@pytest.mark.parametrize(
    ("ratios", "is_refusing"),
    [((), True), ((1.0,), True), ((LEAST + 0.01,), True), ((0.1,), False),
     ((0.1, AGAIN - 0.01), False), ((0.1, AGAIN + 0.01), True)],
)  # fmt: skip
def test_it_refuses_only_while_answers_take_about_as_long_as_predicted(
    ratios: tuple[float, ...], is_refusing: bool
) -> None:
    door = Door("fcfs-fill")
    for ratio in ratios:
        answered(door, ratio, was_sampled=False)
    assert refuses(door) == is_refusing


def test_the_sample_gives_the_share_on_time_despite_late_predictions() -> None:
    door = Door("fcfs-fill")
    assert door.overload.trust.good_share is None
    # The deadline is one second for the first token, and 0.1 s per token: two seconds.
    answered(door, 1.9, 30, was_sampled=True)
    answered(door, 2.1, 10, was_sampled=True)
    answered(door, 1.0, 10, was_sampled=False)
    assert door.overload.trust.good_share == 0.75
