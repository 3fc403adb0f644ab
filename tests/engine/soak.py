"""An hour at more than a server can do: `python -m tests.engine.soak --minutes 60`.

A server under `sage` on a device clock gets 1.5 times what it was measured to sustain, in Poisson
arrivals with bursts between them. Clients lose patience: they abort their request or hang up. Each
minute the memory of every process of the server is read; the history is full from the beginning, as
it takes memory while it fills. Exit code 1 unless each process is at the
end within 5 % of what it had in the tenth minute, every request came back or was given up, and
nothing is held when all is over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import requests

from bench.engines.clock.device import Device
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_MODEL,
    PolicyServers,
    scheduler_state,
)
from bench.engines.server.server import Server
from bench.workloads import chats
from bench.workloads.forced_length import LENGTH_KEY, ForcedLength
from bench.workloads.prompts import WorkloadRequest
from sage_sched.app.config import SageConfig, StoreConfig
from tests.checks.exactness import STRICT

_OUTPUT = Path("results/soak")
_CAP_TOKENS = 2048
_WARM_UP_S = 120.0
# While it is measured what the server can do, so many are always there.
_NUM_CLOSED = 400
_OVERLOAD = 1.5
_MEAN_PATIENCE_S = 90.0
_BURST_EVERY_S, _BURST_SIZE = 300.0, 100
_REFERENCE_MINUTE, _MAX_GROWTH = 10, 0.05


class Clients:
    """Those who ask one server, and what became of their requests."""

    def __init__(self, server: Server, prompts: list[WorkloadRequest], seed: int) -> None:
        self._url = server.url
        self._prompts = prompts
        self._rng = random.Random(seed)
        self._num_sent = 0
        self.counts: Counter[str] = Counter()

    async def ask(self, session: aiohttp.ClientSession, patience_s: float | None) -> None:
        """One request; patience_s: None for a client that waits as long as it takes."""
        self._num_sent += 1
        rid, hangs_up = f"soak-{self._num_sent}", self._rng.random() < 0.5
        request = self._rng.choice(self._prompts)
        length = min(request.output_tokens, _CAP_TOKENS)
        body = {
            "rid": rid,
            "text": f"{request.prompt} ({self._num_sent})",
            "stream": True,
            "custom_logit_processor": ForcedLength().to_str(),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": _CAP_TOKENS,
                "custom_params": {LENGTH_KEY: length},
            },
        }
        answer = asyncio.create_task(self._read(session, body))
        done, _ = await asyncio.wait({answer}, timeout=patience_s)
        if not done and hangs_up:
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer
            self.counts["hung up"] += 1
            return
        if not done:
            async with session.post(f"{self._url}/abort_request", json={"rid": rid}) as told:
                told.raise_for_status()
        self.counts[await answer] += 1

    async def _read(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        last = b""
        async with session.post(f"{self._url}/generate", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    last = line
        return "aborted" if b'"type":"abort"' in last.replace(b" ", b"") else "answered"

    async def capacity(self) -> float:
        """Requests a second that the server answers when it always has enough to do."""
        ends, began_at = time.monotonic() + _WARM_UP_S, 0
        async with _session() as session:

            async def one_after_the_other() -> None:
                while time.monotonic() < ends:
                    await self.ask(session, None)

            clients = [asyncio.create_task(one_after_the_other()) for _ in range(_NUM_CLOSED)]
            await asyncio.sleep(_WARM_UP_S / 3)  # the first to end are the short ones
            began_at, began_s = self.counts["answered"], time.monotonic()
            await asyncio.sleep(max(0.0, ends - began_s))
            rate = (self.counts["answered"] - began_at) / (time.monotonic() - began_s)
            await asyncio.gather(*clients)
        return rate

    async def overload(self, rate: float, minutes: float, each_minute: Any) -> None:
        """Poisson arrivals at the rate, and bursts. Returns when all have come back."""
        tasks: set[asyncio.Task[None]] = set()
        began = time.monotonic()
        next_minute, next_burst = began + 60, began + _BURST_EVERY_S
        async with _session() as session:
            while (now := time.monotonic()) < began + 60 * minutes:
                size = 1
                if now >= next_burst:
                    next_burst += _BURST_EVERY_S
                    size = _BURST_SIZE
                if now >= next_minute:
                    next_minute += 60
                    each_minute()
                for _ in range(size):
                    patience_s = self._rng.expovariate(1 / _MEAN_PATIENCE_S)
                    task = asyncio.create_task(self.ask(session, patience_s))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(self._rng.expovariate(rate))
            await asyncio.gather(*tasks)
        each_minute()


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


def memory_mib(server: Server) -> dict[str, float]:
    """Resident memory of each process of the server, by what it is."""
    assert server.pid is not None
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    found: dict[str, float] = {}
    for process in processes:
        words = " ".join(process.cmdline())
        kinds = (
            "launch_server",
            "scheduler",
            "detokenizer",
            "predictor_store.service.worker_process",
        )
        kind = next((kind for kind in kinds if kind in words), None)
        if kind is not None:
            found[kind] = found.get(kind, 0.0) + process.memory_info().rss / 2**20
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--preset", default="h800-qwen3-32b", help="default: %(default)s")
    parser.add_argument("--speed", type=float, default=1.0, help="default: %(default)s")
    args = parser.parse_args()
    workload = chats.generated(6_000, args.seed)
    device = Device.named(args.preset, args.speed)
    servers = PolicyServers(
        model=write_model(_OUTPUT / "model", **CPU_MODEL),
        folder=_OUTPUT,
        flags=CPU_ENGINE_FLAGS,
        env=CPU_ENV | STRICT,
        sage=SageConfig(StoreConfig(capacity=len(workload.observations()))),
        device=device,
    )
    servers.warm(workload.observations())
    with servers.server("sage", "soak") as server:
        return run(server, list(workload.evaluation), args.minutes, args.seed)


def run(server: Server, prompts: list[WorkloadRequest], minutes: float, seed: int) -> int:
    clients = Clients(server, prompts, seed)
    rate = asyncio.run(clients.capacity())
    print(f"the server sustains {rate:.1f} requests/s; it gets {_OVERLOAD * rate:.1f}", flush=True)
    readings: list[dict[str, float]] = []

    def each_minute() -> None:
        readings.append(memory_mib(server))
        memory = ", ".join(f"{kind} {mib:.0f}" for kind, mib in readings[-1].items())
        print(f"minute {len(readings)}: {dict(clients.counts)}, MiB: {memory}", flush=True)

    asyncio.run(clients.overload(_OVERLOAD * rate, minutes, each_minute))
    problems = []
    reference = readings[min(_REFERENCE_MINUTE, len(readings)) - 1]
    for kind, mib in readings[-1].items():
        if mib > reference[kind] * (1 + _MAX_GROWTH):
            problems.append(f"{kind} grew from {reference[kind]:.0f} to {mib:.0f} MiB")
    state = scheduler_state(server)
    moves = state["preemption"]
    back = moves["num_resumed"] + moves["num_recomputed"]
    if back > moves["num_preemptions"]:
        problems.append(f"{back} came back of {moves['num_preemptions']} that yielded")
    if state["num_policy_errors"]:
        problems.append(f"the policy failed {state['num_policy_errors']} times")
    # SGLang flushes only if nobody holds anything.
    if not requests.post(f"{server.url}/flush_cache", timeout=60).ok:
        problems.append("something is held when all is over")
    print(f"{moves}\n" + ("\n".join(problems) or "nothing found"))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
