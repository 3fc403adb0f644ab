"""What was predicted of a request, and what became of it, in its own answer: `meta_info.sage`.

A scheduler's facts travel with the tokens, in SGLang's customized_info; the HTTP process puts the
last ones it was told into the answer.
"""

from __future__ import annotations

from typing import Any

from patches.engine_types import Req
from sage_sched.job import Job


def predicted(job: Job) -> dict[str, Any]:
    """Of its answer, in tokens: the median, the 80 % quantile, and what that rests on."""
    if (lengths := job.distribution) is None:
        return {"p50_tokens": None, "p80_tokens": None, "source": "none"}
    return {
        "p50_tokens": lengths.quantile(0.5),
        "p80_tokens": lengths.quantile(0.8),
        "source": lengths.source,
    }


class Explanation:
    """In the place of a list with something for each token: whatever part of it SGLang asks for
    (managers/scheduler_components/output_streamer.py), it is the facts by now."""

    def __init__(self, req: Req) -> None:
        self._req = req
        self._predicted = predicted(req.sage.job)

    def __getitem__(self, tokens: object) -> list[dict[str, Any]]:
        state = self._req.sage
        facts = {
            **self._predicted,
            "place_at_arrival": state.waits.num_before,
            "wait_ms": round(1e3 * state.waits.so_far_s(), 3),
            "num_yields": state.job.num_yields,
        }
        return [facts]
