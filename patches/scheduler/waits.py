"""When a request came, and how long it has waited: for explanations, never for a decision."""

from __future__ import annotations

import time
from dataclasses import dataclass

from patches.carrier import decode_stamp
from patches.engine_types import Req


@dataclass(slots=True)
class Waits:
    """Of one request, in seconds of this rank's clock.

    since_s: when its present wait began; None while it runs. waited_s: all waits before.
    num_before: how many were to be served before it when it was first put in order; None until
    then.
    """

    since_s: float | None
    waited_s: float = 0.0
    num_before: int | None = None

    @classmethod
    def of(cls, req: Req) -> Waits:
        """Of a request that comes now: it has waited for its prediction already."""
        return cls(decode_stamp(req.sampling_params.custom_params, time.monotonic()))

    def begins(self) -> None:
        """It has yielded."""
        self.since_s = time.monotonic()

    def ends(self) -> None:
        """It runs."""
        if self.since_s is not None:
            self.waited_s += time.monotonic() - self.since_s
            self.since_s = None

    def was_retracted(self, since_s: float) -> None:
        """SGLang took it off the device, and it runs again. since_s: when it was back in the queue,
        by SGLang's stamp (time.perf_counter)."""
        if self.since_s is None and since_s > 0:
            self.waited_s += max(0.0, time.perf_counter() - since_s)

    def so_far_s(self) -> float:
        """All that it has waited by now."""
        if self.since_s is None:
            return self.waited_s
        return self.waited_s + time.monotonic() - self.since_s
