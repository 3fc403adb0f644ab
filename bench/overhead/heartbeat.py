"""An SGLang server that measures the pauses of its own event loop.

`python -m bench.overhead.heartbeat FLAGS...` starts `sglang.launch_server FLAGS...` with a task
that wakes every PERIOD_MS, and GET /heartbeat, which tells by how much it overslept and starts
anew.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import numpy as np

PERIOD_MS = 1.0


class Heartbeat:
    """Collects how many milliseconds late each wake-up came."""

    def __init__(self) -> None:
        self._late_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def take(self) -> dict[str, float]:
        """The pauses since the last call: their number, quantiles and the longest, in ms."""
        if self._task is None:  # only now does the server's own loop run
            self._task = asyncio.create_task(self._beat())
            await asyncio.sleep(0.1)
        late_ms, self._late_ms = np.asarray(self._late_ms or [0.0]), []
        return {
            "num_beats": float(late_ms.size),
            "p50_ms": float(np.quantile(late_ms, 0.5)),
            "p99_ms": float(np.quantile(late_ms, 0.99)),
            "p999_ms": float(np.quantile(late_ms, 0.999)),
            "longest_ms": float(late_ms.max()),
        }

    async def _beat(self) -> None:
        while True:
            slept_from = time.perf_counter()
            await asyncio.sleep(PERIOD_MS / 1e3)
            self._late_ms.append((time.perf_counter() - slept_from) * 1e3 - PERIOD_MS)


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    from sglang.srt.entrypoints.http_server import app

    app.get("/heartbeat")(Heartbeat().take)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
