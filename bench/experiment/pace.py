"""Compares arms on real servers within a time, on a clock as fast as the host keeps up with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bench.engines.server.server import ServerError
from bench.experiment.records import Record
from bench.policies.arm import Arm

# Assumed seconds to start a server and warm it up, until one was started.
_START_S = 60.0


class Pace:
    """Serves the same seeds under each arm, as many as the time allows.

    If the host holds a run up, the clock goes on at half the speed. Before each run it checks that
    the other arms can still serve as many seeds.
    """

    def __init__(
        self,
        serve: Callable[[float, Arm, int], Record],
        speed: float,
        run_s: float,
        budget_s: float,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """serve: serves a seed at a speed; it starts a server if arm or speed has changed.
        run_s: the time of a run on the device.
        budget_s: the time for all runs, from now on.
        """
        self._serve, self._say, self._now = serve, say, now
        self._speed, self._run_s, self._end_s = speed, run_s, now() + budget_s
        self._start_s, self._reset_s = _START_S, 0.0
        self._up: tuple[float, Arm] | None = None
        self._found: dict[str, list[Record]] = {}

    def compare(self, arms: Sequence[Arm], seeds: Sequence[int]) -> None:
        """Serve the seeds that there is time for. Raises ServerError if a server fails."""
        for num_later, arm in zip(reversed(range(len(arms))), arms, strict=True):
            self._found[arm.name] = served = list[Record]()
            for seed in seeds:
                record = self._valid(arm, seed, len(seeds), len(served), num_later)
                if record is None:
                    break
                served.append(record)
            seeds = [record.seed for record in served]

    def found(self, arms: Sequence[Arm]) -> list[Record]:
        """Return the valid records of seeds that every arm has served."""
        served = [self._found.get(arm.name, []) for arm in arms]
        seeds = set.intersection(*({record.seed for record in of_arm} for of_arm in served))
        return [record for of_arm in served for record in of_arm if record.seed in seeds]

    def _valid(
        self, arm: Arm, seed: int, num_seeds: int, num_served: int, num_later: int
    ) -> Record | None:
        """Return a valid run, at a lower speed if need be; None if there is no time for it."""
        while self._needs_s(arm, 1, num_later, num_served + 1) <= (left_s := self._left_s()):
            planned_s = self._needs_s(arm, num_seeds - num_served, num_later, num_seeds)
            self._say(
                f"real servers: {arm.name}, run {num_served + 1} of {num_seeds}, "
                f"{self._speed:g} times as fast as reality; "
                f"{_minutes(min(planned_s, left_s))} to the end"
            )
            record = self._timed(arm, seed)
            if not record.problem:
                return record
            if "device" not in record.about:
                raise ServerError(record.problem)
            self._speed /= 2
            self._say(f"invalid: {record.problem}. Half the speed: {self._speed:g}")
        return None

    def _timed(self, arm: Arm, seed: int) -> Record:
        """Serve a seed, and learn the time that it takes besides the device's."""
        began_s, is_up = self._now(), self._up == (self._speed, arm)
        record = self._serve(self._speed, arm, seed)
        self._up = self._speed, arm
        late_s = (record.about.get("device") or {}).get("late_s", 0.0)
        besides_s = self._now() - began_s - (self._run_s + late_s) / self._speed
        if is_up:
            self._reset_s = max(0.0, besides_s)
        else:
            self._start_s = max(0.0, besides_s)
        return record

    def _needs_s(self, arm: Arm, num_runs: int, num_later: int, num_runs_later: int) -> float:
        """Return the time for runs of this arm, and for those of each later arm."""
        num_starts = num_later + (self._up != (self._speed, arm))
        each_s = self._run_s / self._speed + self._reset_s
        return num_starts * self._start_s + (num_runs + num_later * num_runs_later) * each_s

    def _left_s(self) -> float:
        return self._end_s - self._now()


def _minutes(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"about {minutes} minute{'s' * (minutes > 1)}"
