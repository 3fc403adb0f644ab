"""How much a running job's yielding is worth, as far as can be foreseen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import ref

import numpy as np

from sage_sched.distribution import Floats
from sage_sched.index import Indices
from sage_sched.job import Job
from sage_sched.view import SchedulerView

# So many waiting jobs are looked at, in their order.
_NUM_FORESEEN = 128
# Time that the device stands still delays those who come later too: it counts as so many times
# what it costs those who are here. Once makes agents' steps longer; with four times, first tokens
# come late where a few answers are very long.
_DELAY = 2.0


class Those(NamedTuple):
    """Waiting jobs in their order, or running ones; arrays of shape (jobs,).

    places: in the queue, or where a running job would be. steps: expected decode steps to go.
    held: room that it holds meanwhile, of what is scarce. indices: the cost of its completion, in
    any unit.
    """

    places: Floats
    steps: Floats
    held: Floats
    indices: Floats

    def of_slots(self) -> Those:
        """The same if slots are scarce."""
        return self._replace(held=np.ones(len(self.places)))


def gains_steps(waiting: Those, running: Those) -> Floats:
    """For each running job, how many steps less all jobs together wait if it yields; below 0: more.

    If v yields, the jobs ahead of its place start earlier, and v starts again after them. Room
    (slots, or KV tokens) also becomes free as running jobs end. Let m jobs be ahead of v, each
    holding h for x steps on average. With v's room added, all of them have started after `wait`
    steps. That is v's loss. It is small in a large batch, where room becomes free every few steps.

    Their gain: while v would have stayed, a share P of the horizon, its room lets m of them start a
    departure earlier, held / h at a time. After v would have ended, they end too and make room for
    others: an index is the cost of a completion, so what v would have spent on one buys them
    G_v / G. With G their mean index,

        gain = wait * (P * held / h + (1 - P) * G_v / G - 1)

    So yielding is worth much if v is likely to outlast the wait and costs more than they do, and
    nothing if they will start soon anyway. The horizon is the wait. On few slots, of which v has a
    large share, it is longer, up to v's own end and beyond: on one slot P is 0, which leaves the
    Gittins rule. Only the mean of v's time to go is known; P takes that time to be memoryless.
    """
    if not len(waiting.places):
        return np.zeros(len(running.places))
    num_ahead = np.searchsorted(waiting.places, running.places)
    num = np.maximum(1, num_ahead)
    last = num - 1
    held, index = np.cumsum(waiting.held)[last], np.cumsum(waiting.indices)[last]
    claimed = np.cumsum(waiting.held * waiting.steps)[last]
    wait_steps = _wait_steps(running, claimed, claimed / held)
    own_share = np.minimum(1.0, running.held * wait_steps / claimed)
    horizon_steps = wait_steps / np.maximum(1e-6, 1.0 - own_share)
    stays = running.steps / horizon_steps * -np.expm1(-horizon_steps / running.steps)
    worth = stays * running.held * num / held + (1.0 - stays) * running.indices * num / index
    gains: Floats = wait_steps * (worth - 1.0) * (num_ahead > 0)
    return gains


def _wait_steps(running: Those, claimed: Floats, mean_steps: Floats) -> Floats:
    """For each running job, how many steps it takes until all that claim this much have started, if
    its room is free from now on; shape (running,).

    The room of a job that runs as long as they do counts in full. That of a job that stays longer
    counts by as much less, unless the wait is longer still.
    """
    soonest_first = np.argsort(running.steps)
    left, held = running.steps[soonest_first], running.held[soonest_first]
    soon = np.append(0.0, np.cumsum(held))
    late = np.append(np.cumsum((held / left)[::-1])[::-1], 0.0)
    reach = mean_steps
    for _ in range(3):
        num_soon = np.searchsorted(left, reach, side="right")
        own = running.held * np.minimum(1.0, reach / running.steps)
        room = soon[num_soon] + reach * late[num_soon] - own + running.held
        wait_steps: Floats = np.maximum(1.0, claimed / room)
        reach = np.maximum(mean_steps, wait_steps / 2)
    return wait_steps


class Outlook:
    """For how long the server may stand still so that a running job can yield.

    This is how much less all jobs wait together (gains_steps), divided by _DELAY. If memory is
    scarce, a prefill step is subtracted: under KV pressure one completion admits several requests
    in one prefill, while jobs for which others yield need a prefill of their own, shared by all of
    that pass. If slots are scarce, each has its own prefill in any case.
    """

    def __init__(self, indices: Indices, key: Callable[[Job, SchedulerView], float]) -> None:
        self._indices, self._key = indices, key
        self._seen: tuple[ref[SchedulerView], dict[float, dict[Job, float]]] | None = None

    def worth_s(self, running: Job, view: SchedulerView) -> float:
        """view: its waiting jobs in their order. Computed once a view and level, for all running
        jobs."""
        if self._seen is None or self._seen[0]() is not view:
            self._seen = (ref(view), {})
        worth_s = self._seen[1]
        if running.level not in worth_s:
            worth_s[running.level] = self._all_worth_s(running.level, view)
        return worth_s[running.level].get(running, 0.0)

    def _all_worth_s(self, level: float, view: SchedulerView) -> dict[Job, float]:
        """What it is worth to yield to jobs of this level. Only jobs whose worth exceeds the price
        of moving their KV with nothing of it cached; the others would not yield at that price."""
        running = [job for job in view.running if job.is_ranked]
        first = [job for job in view.waiting[:_NUM_FORESEEN] if job.is_ranked]
        waiting = [job for job in first if job.level == level]
        those_running, those_waiting = self._those(running, view), self._those(waiting, view)
        step_time, num_jobs = view.server.step_time, len(view.running) + len(view.waiting)
        kv_tokens = view.running_kv_tokens
        step_s = step_time.decode_s(len(view.running), kv_tokens) / _DELAY
        slots = len(view.running) + max(0, view.free_slots)
        if len(view.running) * view.server.kv_pool_tokens > slots * kv_tokens:
            gains_s = step_s * gains_steps(those_waiting.of_slots(), those_running.of_slots())
        else:
            gains_s = step_s * gains_steps(those_waiting, those_running)
            num_ahead = np.searchsorted(those_waiting.places, those_running.places)
            num_willing = np.count_nonzero(gains_s > 0)
            together = np.maximum(1, np.minimum(num_ahead, num_willing))
            gains_s -= step_time.prefill_base_s * num_jobs / together
        worth_s = (gains_s / num_jobs).tolist()
        found = {}
        for job, worth in zip(running, worth_s, strict=True):
            kv_tokens = job.input_tokens + job.generated_tokens
            move_s = min(view.server.swap_s(kv_tokens), view.server.recompute_s(kv_tokens))
            if worth > 0 and worth > move_s:
                found[job] = worth
        return found

    def _those(self, jobs: Sequence[Job], view: SchedulerView) -> Those:
        standings = [self._indices.of(job) for job in jobs]
        steps = np.array([standing.steps for standing in standings])
        held = np.array([job.input_tokens + job.generated_tokens for job in jobs])
        places = [-math.inf if job.is_promised else self._key(job, view) for job in jobs]
        indices = np.array([standing.index for standing in standings])
        return Those(np.array(places), steps, held + steps / 2, indices)
