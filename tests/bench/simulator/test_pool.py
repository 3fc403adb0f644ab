from __future__ import annotations

import pytest

from bench.simulator.pool import KvPool
from bench.simulator.request import Progress, SimRequest
from sage_sched.job import Job


def swapped_out(num_tokens: int, document: int) -> Progress:
    """A request with KV of so many tokens of a document, which others may share."""
    request = SimRequest(
        arrival_s=0.0, input_tokens=num_tokens, output_tokens=9, max_new_tokens=9,
        distribution=None, class_name="", spans=((document, 0, num_tokens),),
    )  # fmt: skip
    progress = Progress(request, 0, Job(0, num_tokens, 9, None, 0))
    progress.job.grow(1)
    progress.swapped = True
    return progress


@pytest.mark.parametrize(("held_tokens", "has_room"), [(4, True), (5, False)])
@pytest.mark.parametrize("cached_tokens", [0, 3])
def test_a_request_comes_back_if_all_of_it_fits(
    held_tokens: int, has_room: bool, cached_tokens: int
) -> None:
    pool, returning = KvPool(10, 1), swapped_out(6, document=1)
    if cached_tokens:  # another has left a part in the tree
        other = swapped_out(cached_tokens, document=1)
        pool.hold(cached_tokens)
        pool.publish(other, cached_tokens)
        pool.leave(other)
    pool.hold(held_tokens)
    before = pool.room_tokens
    assert pool.take_back(returning) is has_room
    assert pool.room_tokens == (0 if has_room else before)
