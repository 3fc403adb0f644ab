"""Shares the slots of LoRA adapters among requests for more adapters than there are slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sage_sched.job import Job
from sage_sched.limit import Limit
from sage_sched.plan import Preempt, PreemptionMode
from sage_sched.view import Holding, SchedulerView

# How long another adapter has the slot, and how long the adapter that gave it away then keeps it.
# Readers hardly notice a pause of a second.
_TURN_S, _REST_S = 1.0, 2.0
# Swaps take at most this share of the time of a turn.
_SWAP_SHARE = 0.1
# The rest is doubled, up to this, if no request has used the turn.
_LONGEST_REST_S = 60.0
# Without swaps a slot has to run empty. This is tried only if it is expected to take at most
# _DRAIN_S, and less often, because requests of that adapter have to wait meanwhile.
_DRAIN_S, _DRAIN_REST_S = 20.0, 30.0
_WHY = "another adapter has its turn"


@dataclass(slots=True)
class _Turn:
    """A turn of the guest, an adapter without a slot, in the slot of the host.

    may_move: whether running requests are swapped out for it. If not, they run to their ends.
    ends_s: when it ends or, until the host's slot is free, is given up.
    has_slot: whether the host's slot is free for the guest.
    was_used: whether a request of the guest has run.
    is_over: whether the slot goes back to the host.
    """

    guest: str
    host: str
    may_move: bool
    turn_s: float
    ends_s: float
    has_slot: bool = False
    was_used: bool = False
    is_over: bool = False


class Adapters(Limit):
    """Gives adapters without a slot a turn in the slot of another adapter.

    SGLang runs requests of as many adapters at a time as there are slots. An adapter keeps its slot
    while a request of it runs, so a steady flow of requests would keep it for ever.

    If adapters without a slot have waited for _REST_S, one of them, the guest, gets the slot of one
    other, the host, for _TURN_S. The host's running requests are swapped out. Then the guest's are,
    the host's resume, and after another rest the next adapter has its turn. So a request of a
    loaded adapter waits for at most a turn, however many adapters clients name, and each of k
    adapters without a slot has a turn every k * (_TURN_S + _REST_S). All other adapters keep their
    slots. Where requests cannot be swapped, the host's slot has to run empty first.

    A request of a better priority is not swapped out for another.

    plan_by_s: when the next plan is due, by SchedulerView.now_s.
    """

    def __init__(self) -> None:
        self.plan_by_s = math.inf
        self.is_engaged = False
        self._waiting: dict[str, dict[Job, None]] = {}
        self._turn: _Turn | None = None
        # When the last turn ended, or an adapter without a slot was first seen; and when the next
        # turn may begin.
        self._since_s = self._next_s = math.inf
        self._rest_s = _REST_S
        # The number of the last turn of each adapter, as guest or host.
        self._turns: dict[str, int] = {}

    def concerns(self, job: Job) -> bool:
        return bool(job.adapter)

    def queued(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._waiting.setdefault(job.adapter, {})[job] = None

    def dequeued(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            others = self._waiting.get(job.adapter, {})
            others.pop(job, None)
            if not others:
                self._waiting.pop(job.adapter, None)

    def open(self, view: SchedulerView) -> Callable[[Job], bool]:
        """Start a walk through the order. Return a function to call with each job in turn. It
        returns whether the job stays in the queue, so that no job is preempted for it."""
        may_run = _MayRun(self._turn, _on_device(view), view, in_order=True)
        return lambda job: not may_run[job.adapter]

    def has_slot(self, view: SchedulerView) -> Callable[[Job], bool]:
        """Return a function that tells whether a waiting job's adapter may run now, together with
        the adapters on the device."""
        may_run = _MayRun(self._turn, _on_device(view), view)
        return lambda job: may_run[job.adapter]

    def moves(self, view: SchedulerView) -> list[tuple[Preempt, Holding]]:
        """Begin, continue or end a turn, once a pass. Return the running jobs to swap out for it,
        with the KV that they hold."""
        self.plan_by_s = math.inf
        loaded = _on_device(view)
        if not loaded:  # the next job that enters takes its slot
            self._turn, self._since_s = None, math.inf
            return []
        if self._turn is None:
            self._turn = self._begun(loaded, view)
        return [] if self._turn is None else self._go_on(self._turn, loaded, view)

    def _begun(self, loaded: set[str], view: SchedulerView) -> _Turn | None:
        """Return a new turn if one is due."""
        cold = [
            name
            for name in self._waiting
            if name not in loaded and not view.kv.fits_adapters({*loaded, name})
        ]
        if not cold:
            self._since_s, self._rest_s = math.inf, _REST_S
            return None
        now_s = view.now_s
        if self._since_s == math.inf:
            self._since_s, self._next_s = now_s, now_s + self._rest_s
        if now_s < self._next_s:
            self.plan_by_s = self._next_s
            return None
        self._next_s = self.plan_by_s = now_s + _TURN_S  # unless a turn begins now
        self._turns = {name: self._turns[name] for name in self._turns if name in {*cold, *loaded}}
        guest = min(cold, key=lambda name: (self._turns.get(name, 0), self._first(name)))
        return self._in_place_of(self._hosts(guest, view), guest, view)

    def _first(self, name: str) -> int:
        return next(iter(self._waiting[name])).arrival

    def _hosts(self, guest: str, view: SchedulerView) -> dict[str, list[Job]]:
        """Return the running jobs of each adapter whose slot the guest may have."""
        level = min(job.level for job in self._waiting[guest])
        of: dict[str, list[Job]] = {}
        for job in view.running:
            of.setdefault(job.adapter, []).append(job)
        kept = {job.adapter for job in view.chunked_jobs}
        kept |= {name for name, jobs in of.items() if any(job.level < level for job in jobs)}
        return {name: jobs for name, jobs in of.items() if name not in kept}

    def _in_place_of(
        self, hosts: dict[str, list[Job]], guest: str, view: SchedulerView
    ) -> _Turn | None:
        """Return a turn in the slot of the host whose last turn was longest ago; in a tie, the one
        with the least KV. Without swaps, take the host expected to run empty first."""
        tokens = {name: _kv_tokens(jobs) for name, jobs in hosts.items()}
        movable = [
            name
            for name, jobs in hosts.items()
            if tokens[name] <= view.host_free_tokens and _may_move(jobs)
        ]
        if view.may_preempt and movable:
            host = min(movable, key=lambda name: (self._turns.get(name, 0), tokens[name], name))
            turn_s = max(_TURN_S, view.server.swap_s(tokens[host]) / _SWAP_SHARE)
            return _Turn(guest, host, True, turn_s, view.now_s + turn_s)
        if not hosts or view.now_s < self._since_s + _DRAIN_REST_S:
            return None
        empty_s = {name: _left_s(jobs, view) for name, jobs in hosts.items()}
        host = min(empty_s, key=lambda name: (empty_s[name], name))
        if empty_s[host] > _DRAIN_S:
            return None
        return _Turn(guest, host, False, _TURN_S, view.now_s + 2 * _DRAIN_S)

    def _go_on(
        self, turn: _Turn, loaded: set[str], view: SchedulerView
    ) -> list[tuple[Preempt, Holding]]:
        waits, runs = turn.guest in self._waiting, turn.guest in loaded
        turn.was_used |= runs
        if not turn.has_slot and turn.host not in loaded:
            turn.has_slot, turn.ends_s = True, view.now_s + turn.turn_s
        turn.is_over |= view.now_s >= turn.ends_s or not (waits or runs)
        has_moved = not turn.may_move or turn.host in loaded or turn.host not in self._waiting
        if (turn.is_over and has_moved) or view.kv.fits_adapters({*loaded, *self._waiting}):
            self._end(turn, view)
            return []
        leaves, enters = (turn.guest, turn.host) if turn.is_over else (turn.host, turn.guest)
        is_moving = turn.may_move and leaves in loaded
        self.plan_by_s = view.now_s if is_moving else turn.ends_s
        if not is_moving or enters not in self._waiting:
            return []
        to = next(iter(self._waiting[enters]))
        return [
            (Preempt(job, PreemptionMode.SWAP, _WHY, to), holding)
            for job, holding in _movable(leaves, view)
        ]

    def _end(self, turn: _Turn, view: SchedulerView) -> None:
        number = 1 + max(self._turns.values(), default=0)
        self._turns |= {turn.guest: number, turn.host: number}
        rest_s = max(_REST_S, 2 * turn.turn_s)
        self._rest_s = rest_s if turn.was_used else min(2 * self._rest_s, _LONGEST_REST_S)
        self._turn, self._since_s = None, view.now_s
        self._next_s = self.plan_by_s = view.now_s + self._rest_s


class _MayRun(dict[str, bool]):
    """Decides for each adapter whether its requests may run with the adapters on the device.

    in_order: whether adapters are asked for in the order in which requests enter. Then adapters of
        earlier requests that may run count too.
    """

    def __init__(
        self, turn: _Turn | None, loaded: set[str], view: SchedulerView, *, in_order: bool = False
    ) -> None:
        self._turn, self._loaded, self._in_order = turn, loaded, in_order
        self._beside, self._fits = {*loaded}, view.kv.fits_adapters

    def __missing__(self, name: str) -> bool:
        is_open = self._turn is None or _is_open(name, self._turn, self._loaded)
        fits = is_open and (name in self._beside or self._fits({*self._beside, name}))
        self[name] = fits
        if fits and self._in_order:
            self._beside.add(name)
        return fits


def _is_open(name: str, turn: _Turn, loaded: set[str]) -> bool:
    """Whether requests for this adapter may enter during a turn."""
    leaves, enters = (turn.guest, turn.host) if turn.is_over else (turn.host, turn.guest)
    return name == enters or (name in loaded and name != leaves)


def _on_device(view: SchedulerView) -> set[str]:
    return {job.adapter for job in (*view.running, *view.chunked_jobs)}


def _kv_tokens(jobs: Sequence[Job]) -> int:
    return sum(job.input_tokens + job.generated_tokens for job in jobs)


def _may_move(jobs: Sequence[Job]) -> bool:
    return not any(job.is_pinned or job.keeps_memory for job in jobs)


def _movable(name: str, view: SchedulerView) -> Iterator[tuple[Job, Holding]]:
    """Yield the jobs of an adapter that can be swapped out now and fit into host memory."""
    host_free_tokens = view.host_free_tokens
    for job in view.running:
        if job.adapter != name or (holding := view.kv.holding(job)) is None:
            continue
        if holding.kv_tokens <= host_free_tokens:
            host_free_tokens -= holding.kv_tokens
            yield job, holding


def _left_s(jobs: Sequence[Job], view: SchedulerView) -> float:
    """Return the expected time until the last of these jobs ends."""
    step_s = view.server.step_time.decode_s(len(view.running), view.running_kv_tokens)
    means = [(job, job.mean_tokens() or job.max_new_tokens) for job in jobs]
    return step_s * max(max(1.0, mean - job.generated_tokens) for job, mean in means)
