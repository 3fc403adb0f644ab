"""Models the time that the server's host adds to the device's."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """The time of a server's host for a step and for a move of KV, in seconds.

    SGLang's loop prepares a step while the device runs the one before, so a step takes the longer
    of the device's time and the host's (managers/scheduler.py, event_loop_overlap).

    step_s, request_s: SGLang's own work in a step, and for each running request.
    queued_s: further work of our scheduler in a step while requests wait.
    plan_s: further work of our scheduler if it makes a plan.
    move_s: time for which the device waits at each move of a request's KV, beyond the time of its
        bytes.
    drains: whether a pass that moves KV waits for the device, which then idles until the host has
        prepared the next step.
    """

    step_s: float = 0.0
    request_s: float = 0.0
    queued_s: float = 0.0
    plan_s: float = 0.0
    move_s: float = 0.0
    drains: bool = False

    def times(self, factor: float) -> Host:
        """Return the host with all times multiplied by a factor."""
        seconds = {name: s * factor for name, s in asdict(self).items() if name != "drains"}
        return Host(**seconds, drains=self.drains)

    def work_s(self, num_running: int, *, any_waits: bool = False, plans: bool = False) -> float:
        """Return the host's seconds for a step."""
        own_s = any_waits * self.queued_s + plans * self.plan_s
        return self.step_s + num_running * self.request_s + own_s


NO_HOST = Host()
