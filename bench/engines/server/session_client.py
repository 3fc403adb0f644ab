"""Requests that follow each other's answers, sent to a server: the closed loop of agents."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.engines.server.server import ServerError
from bench.engines.simulator.request import SimRequest

# Token ids below are kept for special tokens.
_FIRST_TOKEN_ID = 1000


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in life-size seconds since the run began.

    cached_tokens: of its prompt. seen: when the client had how many tokens of the answer, both
    rising; empty if nobody looked.
    """

    arrival_s: float
    first_token_s: float
    last_token_s: float
    cached_tokens: int
    seen: tuple[tuple[float, int], ...] = ()

    def token_s(self, num_tokens: int) -> NDArray[np.float64]:
        """When each token of the answer came, evenly between two looks."""
        when, counts = zip(*self.seen, strict=True)
        came_s: NDArray[np.float64] = np.interp(np.arange(1, num_tokens + 1), counts, when)
        return came_s


async def serve_sessions(
    url: str,
    requests: Sequence[SimRequest],
    *,
    vocabulary: int,
    speed: float,
    label: str,
    priority_of: Callable[[SimRequest], int] | None = None,
) -> list[Times]:
    """Send each request at its arrival, or its pause after the answer that it follows.

    vocabulary: how many token ids the model knows. speed: how many times faster than life the
    server is. priority_of: the `priority` that a request's body says; None: none does. Raises
    ServerError if a request fails.
    """
    followers = defaultdict[int | None, list[int]](list)
    for index, request in enumerate(requests):
        followers[request.follows].append(index)
    times: dict[int, Times] = {}
    began = time.perf_counter()

    with tqdm(total=len(requests), desc=label, unit="req", leave=False, mininterval=1) as progress:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session:

            async def ask(index: int, comes_s: float) -> None:
                await asyncio.sleep(began + comes_s / speed - time.perf_counter())
                request = requests[index]
                body = _body(request, index, vocabulary)
                if priority_of is not None:
                    body["priority"] = priority_of(request)
                times[index] = answered = await _answered(session, url, body, began, speed)
                progress.update()
                ended_s = answered.last_token_s
                await asyncio.gather(
                    *(ask(next_, ended_s + requests[next_].pause_s) for next_ in followers[index])
                )

            await asyncio.gather(*(ask(i, requests[i].arrival_s) for i in followers[None]))
    return [times[index] for index in range(len(requests))]


def _body(request: SimRequest, index: int, vocabulary: int) -> dict[str, object]:
    # Imports SGLang.
    from bench.workloads.forced_length import LENGTH_KEY, ForcedLength

    spans = request.spans or ((-1 - index, 0, request.input_tokens),)
    prompt = [_tokens(stream, end, vocabulary)[first:] for stream, first, end in spans]
    return {
        "input_ids": np.concatenate(prompt).tolist(),
        "stream": True,
        "custom_logit_processor": ForcedLength.to_str(),
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": request.max_new_tokens,
            "custom_params": {
                LENGTH_KEY: min(request.output_tokens, request.max_new_tokens - 1),
                "session": request.hints.session,
                "urgency": request.hints.urgency,
            },
        },
    }


def _tokens(stream: int, num_tokens: int, vocabulary: int) -> np.ndarray:
    """The first tokens of a stream; the more one asks for, the more follow."""
    generator = np.random.default_rng(abs(stream) * 2 + (stream < 0))
    return generator.integers(_FIRST_TOKEN_ID, vocabulary, num_tokens)


async def _answered(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], began: float, speed: float
) -> Times:
    sent, seen, meta = time.perf_counter(), list[tuple[float, int]](), None
    async with session.post(f"{url}/generate", json=body) as answer:
        if answer.status != 200:
            raise ServerError(f"a request failed: {(await answer.text())[:300]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                now_s = (time.perf_counter() - began) * speed
                meta = json.loads(line[6:]).get("meta_info")
                if meta is None or (meta["finish_reason"] or {}).get("type") == "abort":
                    raise ServerError(f"a request has no answer: {line[:300]!r}")
                seen.append((now_s, int(meta["completion_tokens"])))
    if meta is None:
        raise ServerError("a request has no answer")
    ended_s = (time.perf_counter() - began) * speed
    return Times(
        (sent - began) * speed, seen[0][0], ended_s, int(meta["cached_tokens"]), tuple(seen)
    )
