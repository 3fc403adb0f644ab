"""Sends requests to a server, at their times or after other answers, and records when tokens
come."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.simulator.request import PAUSE_S, SimRequest
from bench.simulator.result import Served
from sage_sched.gaps import GAPS_PER_S
from sage_sched.slo import Deadlines

# SGLang's reasons in a stream with status 200 under --max-queued-requests: for the request itself,
# or for one of a lower priority.
_QUEUE_IS_FULL = {
    "The request queue is full.",
    "The request is aborted by a higher priority request.",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request, with times in real-time seconds since the run began.

    seen: pairs of a time and the tokens of the answer that the client had by then, both rising.
    late_s: how long after its due time it was sent, because the client was busy.
    error: "" if it went well or was refused. After an error only sent_s means anything.
    is_refused: whether the server refused it because of its load. It then has no tokens.
    """

    sent_s: float
    seen: tuple[tuple[float, int], ...] = ()
    input_tokens: int = 0
    cached_tokens: int = 0
    late_s: float = 0.0
    error: str = ""
    is_refused: bool = False

    @property
    def output_tokens(self) -> int:
        return self.seen[-1][1] if self.seen else 0

    @property
    def first_token_s(self) -> float:
        return self.seen[0][0] if self.seen else self.sent_s

    @property
    def last_token_s(self) -> float:
        return self.seen[-1][0] if self.seen else self.sent_s

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def ttlt_s(self) -> float:
        return self.last_token_s - self.sent_s

    def pauses_s(self, token_s: float) -> tuple[tuple[float, float], ...]:
        """Return the start and end of each pause of PAUSE_S or more.

        A server sends several tokens at a time, so a gap has the time of these tokens, and maybe a
        pause. The client does not see after which token it came: it counts as in the middle.

        token_s: the usual time of a token.
        """
        pauses = []
        for (start_s, before), (end_s, after) in pairwise(self.seen):
            tokens_s = (after - before) * token_s
            if end_s - start_s - tokens_s >= PAUSE_S:
                pauses.append((start_s + tokens_s / 2, end_s - tokens_s / 2))
        return tuple(pauses)

    def token_s(self) -> NDArray[np.float64]:
        """Return when each token came, shape (output_tokens,). The tokens of one message are spread
        evenly over the time since the message before."""
        when, counts = zip(*self.seen, strict=True)
        wanted = np.arange(1, self.output_tokens + 1)
        came_s: NDArray[np.float64] = np.interp(wanted, counts, when)
        return came_s


class _RefusedError(Exception):
    """The server refuses a request because of its load."""


def problem_of(answers: Sequence[Answer]) -> str:
    """Return why the run must not be counted, or "". Refused requests do not make it invalid,
    unless all are refused."""
    failed = [answer for answer in answers if answer.error]
    if failed:
        return f"{len(failed)} of {len(answers)} requests failed: {failed[0].error}"
    return "all requests were refused" if all(answer.is_refused for answer in answers) else ""


def body_of(
    prompt: str | Sequence[int], output_tokens: int, max_new_tokens: int, **said: object
) -> dict[str, Any]:
    """Return a request whose answer will have output_tokens, a number that is hidden from the
    scheduler.

    prompt: a text or token ids.
    said: further custom_params.
    """
    # This imports SGLang.
    from bench.workloads.forced_length import LENGTH_KEY, ForcedLength

    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "stream": True,
        "custom_logit_processor": ForcedLength.to_str(),
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            # Below the cap, so that every answer ends at its end token.
            "custom_params": {LENGTH_KEY: min(output_tokens, max_new_tokens - 1), **said},
        },
    }


def drive(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    arrivals_s: Sequence[float],
    *,
    label: str,
    timeout_s: float = 1800.0,
    speed: float = 1.0,
    follows: Sequence[int | None] = (),
    pauses_s: Sequence[float] = (),
) -> list[Answer]:
    """Send each request at its arrival time and wait for all the answers.

    follows: for each request, the index of the request whose answer it waits for, or None. With an
        index it is sent after that answer and its pause, not at its arrival time.
    timeout_s: a request fails if it is not answered this long after the last arrival and after its
        own sending.
    label: of the progress bar.
    speed: how many times faster than reality the server is. All times given and returned are in
        real time.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one connection per request
    answers: dict[int, Answer] = {}
    followers = defaultdict[int | None, list[int]](list)
    for number in range(len(bodies)):
        followers[follows[number] if follows else None].append(number)
    last_s, began = max(arrivals_s), 0.0

    def now_s() -> float:
        return (time.perf_counter() - began) * speed

    async def ask(session: aiohttp.ClientSession, number: int, comes_s: float) -> None:
        await asyncio.sleep((comes_s - now_s()) / speed)
        body, sent_s, seen = bodies[number], now_s(), list[tuple[float, int]]()
        meta: dict[str, Any] = {}
        is_refused = False
        end_s = max(last_s, sent_s) + timeout_s
        try:
            async with asyncio.timeout((end_s - sent_s) / speed):
                async for meta in _meta_infos(session, f"{url}/generate", body):
                    seen.append((now_s(), int(meta["completion_tokens"])))
            error = _error(body, seen)
        except _RefusedError:
            error, is_refused = "", True
        except TimeoutError:
            error = f"no answer {end_s:.0f} s after the run began"
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            error = str(problem) or repr(problem)
        num_in, num_cached = int(meta.get("prompt_tokens", 0)), int(meta.get("cached_tokens", 0))
        late_s = sent_s - comes_s
        answer = Answer(sent_s, tuple(seen), num_in, num_cached, late_s, error, is_refused)
        answers[number] = answer
        progress.update()
        await asyncio.gather(
            *(ask(session, i, answer.last_token_s + pauses_s[i]) for i in followers[number])
        )

    async def ask_all() -> None:
        nonlocal began
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=1 << 22,  # a line has all of an answer's text
        ) as session:
            began = time.perf_counter()
            await asyncio.gather(*(ask(session, i, arrivals_s[i]) for i in followers[None]))

    with tqdm(total=len(bodies), desc=label, unit="req", leave=False, mininterval=1) as progress:
        asyncio.run(ask_all())
    return [answers[number] for number in range(len(bodies))]


async def _meta_infos(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the meta_info of each part of an answer. Raises _RefusedError if the server refuses
    because of its load, and ValueError if it gives no answer for another reason."""
    async with session.post(url, json=body) as response:
        if response.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise _RefusedError
        if response.status != 200:
            raise ValueError((await response.text()).strip()[:300] or f"status {response.status}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                meta = json.loads(line[6:]).get("meta_info")
                reason = (meta or {}).get("finish_reason") or {}
                if reason.get("message") in _QUEUE_IS_FULL:
                    raise _RefusedError
                if meta is None or reason.get("type") == "abort":
                    raise ValueError(f"no answer: {line[:300].decode(errors='replace')}")
                yield meta


def _error(body: Mapping[str, Any], seen: Sequence[tuple[float, int]]) -> str:
    from bench.workloads.forced_length import LENGTH_KEY

    wanted = body["sampling_params"]["custom_params"][LENGTH_KEY]
    if not seen:
        return "no token came"
    return "" if seen[-1][1] == wanted else f"{seen[-1][1]} tokens came instead of {wanted}"


def as_seen(
    alone_s: Callable[[int, int], float], requests: Sequence[SimRequest], answers: Sequence[Answer]
) -> Served:
    """Return the clients' figures of these requests, at least one of which was not refused.
    alone_s: see Served.of."""
    pairs = [pair for pair in zip(requests, answers, strict=True) if not pair[1].is_refused]
    num_refused = len(answers) - len(pairs)
    requests, answers = zip(*pairs, strict=True)
    token_s = _usual_token_s(answers)
    # Between two messages, tokens count as evenly spread.
    gaps_s = [np.diff(answer.token_s()) for answer in answers]
    return Served.of(
        alone_s,
        requests,
        np.array([answer.sent_s for answer in answers]),
        np.array([answer.first_token_s for answer in answers]),
        np.array([answer.last_token_s for answer in answers]),
        num_refused=num_refused,
        num_next_on_time=np.array([_num_on_time(*pair) for pair in pairs]),
        pauses_s=tuple(answer.pauses_s(token_s) for answer in answers),
        longest_gap_s=np.array([each.max(initial=0.0) for each in gaps_s]),
        gaps=Counter(np.rint(np.concatenate(gaps_s) * GAPS_PER_S).astype(int).tolist()),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
    )


def _usual_token_s(answers: Sequence[Answer]) -> float:
    """Return the median time of a token after the first; 0 if there are none."""
    gaps = [pair for answer in answers for pair in pairwise(answer.seen)]
    num_tokens = np.array([after - before for (_, before), (_, after) in gaps], int)
    gap_s = np.array([end_s - start_s for (start_s, _), (end_s, _) in gaps], float)
    each_s = np.repeat(gap_s / np.maximum(num_tokens, 1), num_tokens)
    return float(np.median(each_s)) if each_s.size else 0.0


def _num_on_time(request: SimRequest, answer: Answer) -> int:
    """Count the tokens after the first that were on time."""
    deadlines = Deadlines.of(request.hints)
    token_s = answer.token_s() - answer.sent_s
    due_s = [deadlines.due_s(token) for token in range(2, len(token_s) + 1)]
    return int((token_s[1:] <= due_s).sum())
