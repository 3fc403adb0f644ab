"""The order of a waiting queue."""

from __future__ import annotations

from collections.abc import Sequence

from sage_sched.job import Job
from sage_sched.policy import Policy


def ranked_order(queue: Sequence[Job | None], policy: Policy, served_tokens: int) -> list[int]:
    """The positions of a queue in the order in which to serve it.

    queue: the waiting jobs; None for a request that the policy did not admit. Such a one keeps
    its position, so it waits for as many others as came before it, as under FCFS; the jobs are
    sorted by key, then arrival, over the remaining positions.
    served_tokens: see Policy.key.
    """
    ranked = [
        (policy.key(job, served_tokens), job.arrival, position)
        for position, job in enumerate(queue)
        if job is not None
    ]
    order = list(range(len(queue)))
    places = [position for _, _, position in ranked]
    ranked.sort()
    for place, (_, _, position) in zip(places, ranked, strict=True):
        order[place] = position
    return order
