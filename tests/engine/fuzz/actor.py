"""Plays a scenario against a server, and collects the answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import requests

from tests.engine.fuzz.scenario import Disturbance, Kind, Scenario, Talk, Trouble, Turn

# If nothing came back after this number of looks, a second apart, the server is stuck. A count,
# because a clock goes on while this process and the server are stopped.
_STALLED_LOOKS = 150
_GENERATE = "/generate"
_SETTINGS = "/sage/settings"
_UPDATE = "/update_weights_from_disk"
# These counters are read while requests come and go.
_COUNTS = ("/server_info", "/metrics", "/v1/loads")
# SGLang refuses to flush, for example while a request runs whose client has gone.
_REFUSED_FLUSHES = ("the cache was not flushed", "Flush cache failed")
_PAUSES = {Trouble.PAUSE_ABORT: "abort", Trouble.PAUSE_IN_PLACE: "in_place"}
# A SWITCH goes back to these settings, and to the policy.
_CALM = {"preemption": {"enabled": True}, "decode": {"max_gap_ms": 1000.0}}


# The body of a request, without the fields that say how the answer comes.
Question = Mapping[str, Any]


@dataclass(slots=True)
class Answer:
    """margins: for each token, the log probability of the first choice, minus that of the second.
    problems: errors of the stream itself."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str = ""  # "" until it ends
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    error: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """A turn and its answer. ended_s: when the answer was complete or the client gone, or inf."""

    talk: Talk
    turn: Turn
    rid: str
    question: Question
    sent_s: float = field(default_factory=time.monotonic)
    ended_s: float = math.inf
    left: bool = False
    asked_to_abort: bool = False
    answer: Answer = field(default_factory=Answer)


@dataclass(slots=True)
class Played:
    """An episode. abort_windows: when all requests were told to end."""

    outcomes: list[Outcome] = field(default_factory=list)
    abort_windows: list[tuple[float, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Actor:
    """One episode's clients. prefix: begins their requests' ids. policy: the server's, except
    during switches."""

    def __init__(self, url: str, model_path: str, policy: str, prefix: str) -> None:
        self._url, self._policy, self._prefix = url, policy, prefix
        self._weights = {"model_path": model_path}
        self._started_s = self._heard_s = 0.0
        self._http: aiohttp.ClientSession | None = None
        self.played = Played()

    async def play(self, scenario: Scenario) -> None:
        """Play an episode. `played` has the events, and whether the server stalled."""
        # A server closes idle connections, some just as they are used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout, most_bytes = aiohttp.ClientTimeout(total=None), 1 << 24  # of a line
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, read_bufsize=most_bytes
        ) as self._http:
            self._started_s = self._heard_s = time.monotonic()
            acts = [*map(self._talk, scenario.talks)]
            acts += map(self._operator, (scenario.troubles, scenario.switches))
            tasks = [asyncio.create_task(act) for act in acts]
            try:
                num_looks = 0
                while not all(task.done() for task in tasks):
                    heard_s = self._heard_s
                    await asyncio.wait(tasks, timeout=1.0)
                    num_looks = num_looks + 1 if heard_s == self._heard_s else 0
                    if num_looks > _STALLED_LOOKS:
                        stalled = f"stalled: nothing came back in {_STALLED_LOOKS} s"
                        self.played.problems.append(stalled)
                        break
            finally:
                for task in tasks:
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                self.played.problems += [
                    f"a client failed: {error!r}" for error in found if isinstance(error, Exception)
                ]

    async def _wait(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, self._started_s + at_s - time.monotonic()))

    async def _post(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        """Return the status and the JSON, or text, of a call. Without a body it is a GET."""
        assert self._http is not None
        method = "GET" if body is None else "POST"
        async with self._http.request(method, self._url + path, json=body) as response:
            text = await response.text()
            self._heard_s = time.monotonic()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text

    async def _demand(
        self, path: str, body: Mapping[str, Any] | None, refusals: Sequence[str] = ()
    ) -> Any:
        """Return the answer of a call, which must succeed or fail with one of these refusals."""
        status, found = await self._post(path, body)
        if status != 200 and not any(refusal in str(found) for refusal in refusals):
            self.played.problems.append(f"{path} {body} gave {status}: {found}")
        return found

    async def _operator(self, disturbances: Sequence[Disturbance]) -> None:
        for disturbance in disturbances:
            await self._wait(disturbance.at_s)
            started_s = time.monotonic()
            await self._disturb(disturbance)
            if disturbance.trouble in (Trouble.ABORT_ALL, Trouble.PAUSE_ABORT):
                self.played.abort_windows.append((started_s, time.monotonic()))

    async def _disturb(self, disturbance: Disturbance) -> None:
        trouble = disturbance.trouble
        if trouble is Trouble.FLUSH:
            await self._post("/flush_cache", {})  # refused while there are requests
        elif trouble is Trouble.ABORT_ALL:
            await self._post("/abort_request", {"abort_all": True})
        elif trouble is Trouble.UPDATE:
            await self._demand(_UPDATE, self._weights, _REFUSED_FLUSHES)
        elif trouble is Trouble.LOOK:
            for path in _COUNTS:
                await self._demand(path, None)
        elif trouble is Trouble.SWITCH:
            await self._demand(_SETTINGS, disturbance.settings)
            await asyncio.sleep(disturbance.for_s)
            await self._demand(_SETTINGS, {"schedule_policy": self._policy, **_CALM})
        else:
            await self._demand("/pause_generation", {"mode": _PAUSES.get(trouble, "retract")})
            if trouble is Trouble.RETRACT_AND_FLUSH:
                await self._demand("/flush_cache", {}, _REFUSED_FLUSHES)
            elif trouble is Trouble.RETRACT_AND_UPDATE:
                await self._demand(_UPDATE, self._weights, _REFUSED_FLUSHES)
            await asyncio.sleep(disturbance.for_s)
            await self._demand("/continue_generation", {})

    async def _talk(self, talk: Talk) -> None:
        await self._wait(talk.at_s)
        session = None
        name = f"{self._prefix}-{talk.name}"
        in_tree = name if talk.kind is Kind.CHAT else None
        if talk.kind in (Kind.SESSION, Kind.STREAMING_SESSION):
            streaming = talk.kind is Kind.STREAMING_SESSION
            opening = {"capacity_of_str_len": 100_000, "streaming": streaming}
            session = await self._demand("/open_session", opening)
        said = list(talk.opening)
        for i, turn in enumerate(talk.turns):
            await asyncio.sleep(turn.pause_s if i else 0.0)
            said += turn.words
            extra: dict[str, Any] = {"rid": f"{name}-{i}", "session_id": in_tree}
            if session is not None:
                extra["session_params"] = {"id": session}
                if i and talk.kind is Kind.SESSION:
                    extra["session_params"]["rid"] = f"{name}-{i - 1}"
                if i:
                    extra["input_ids"] = list(turn.words)
            outcome = Outcome(talk, turn, extra["rid"], _question(turn, said))
            self.played.outcomes.append(outcome)
            await self._ask(outcome, extra)
            if outcome.answer.finish not in ("stop", "length"):
                break
            before, ids = list(talk.opening), outcome.answer.ids
            said = before if talk.kind is Kind.PLAIN else [*said, *ids]
        if (session := session or in_tree) is not None:
            await self._demand("/close_session", {"session_id": session})

    async def _ask(self, outcome: Outcome, extra: Mapping[str, Any]) -> None:
        leave = outcome.turn.leave
        aborting = asyncio.create_task(self._abort(outcome))
        try:
            async with asyncio.timeout(leave.after_s if leave and leave.closes else None) as stays:
                await self._answer(outcome, extra)
        except Exception as error:
            outcome.left = stays.expired()
            if not outcome.left:
                outcome.answer = Answer(error=repr(error)[:300])
        finally:
            aborting.cancel()
            outcome.ended_s = time.monotonic()

    async def _abort(self, outcome: Outcome) -> None:
        leave = outcome.turn.leave
        if leave is not None and not leave.closes:
            await asyncio.sleep(leave.after_s)
            outcome.asked_to_abort = True
            with contextlib.suppress(aiohttp.ClientError):
                await self._post("/abort_request", {"rid": outcome.rid})

    async def _answer(self, outcome: Outcome, extra: Mapping[str, Any]) -> None:
        turn = outcome.turn
        body = _claimed({**outcome.question, **extra, "stream": turn.stream}, turn)
        assert self._http is not None
        url = self._url + _GENERATE
        async with self._http.post(url, json=body, headers=turn.headers) as response:
            if response.status == 200 and turn.stream:
                await self._listen(outcome, response)
            else:
                outcome.answer = _read(response.status, await response.text())
        self._heard_s = time.monotonic()

    async def _listen(self, outcome: Outcome, response: aiohttp.ClientResponse) -> None:
        """Follow a stream to its end."""
        done = False
        async for line in response.content:
            self._heard_s = time.monotonic()
            if line.startswith(b":"):  # a comment of a silent stream (http.comment_every_ms)
                continue
            if not (data := line.strip().removeprefix(b"data: ")):
                continue
            if done:
                outcome.answer.problems.append("something came after the end of the stream")
            elif data == b"[DONE]":
                done = True
            elif "error" in (chunk := json.loads(data)):
                outcome.answer.error = str(chunk)[:300]
            else:
                outcome.answer = _next(outcome.answer, chunk)
        if not done:
            outcome.answer.problems.append("the stream has no end")


def ask(url: str, question: Question) -> Answer:
    """One plain answer. Raises requests.RequestException."""
    response = requests.post(url + _GENERATE, json=question, timeout=300)
    return _read(response.status_code, response.text)


def _read(status: int, text: str) -> Answer:
    return _heard(json.loads(text)) if status == 200 else Answer(error=f"{status}: {text[:300]}")


def _question(turn: Turn, prompt: Sequence[int]) -> Question:
    return {"sampling_params": {**turn.sampling}, "input_ids": [*prompt], **turn.logprobs}


def _claimed(body: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
    """Return a request's body with the client's claims of its importance."""
    said = {"custom_params": {**turn.custom_params}} if turn.custom_params else {}
    priority = {} if turn.priority is None else {"priority": turn.priority}
    return {**body, **priority, "sampling_params": {**body["sampling_params"], **said}}


def _heard(found: Mapping[str, Any]) -> Answer:
    meta = found["meta_info"]
    return Answer(
        text=found.get("text") or "",
        ids=list(found.get("output_ids") or []),
        finish=(meta.get("finish_reason") or {}).get("type", ""),
        logprobs=[one[0] for one in meta.get("output_token_logprobs") or []],
        input_logprobs=[one[0] or 0.0 for one in meta.get("input_token_logprobs") or []],
        top_ids=[one[0][1] if one else -1 for one in meta.get("output_top_logprobs") or []],
        margins=[
            one[0][0] - one[1][0] if len(one or ()) > 1 else math.inf
            for one in meta.get("output_top_logprobs") or []
        ],
    )


def _next(before: Answer, chunk: Mapping[str, Any]) -> Answer:
    """Return the answer after a chunk of /generate, which repeats all text so far."""
    now = replace(_heard(chunk), error=before.error, problems=before.problems)
    if before.finish:
        now.problems.append("the answer went on after its end")
    if now.finish not in ("abort", "stop"):
        if not now.text.startswith(before.text):
            now.problems.append(f"said {before.text!r}, then {now.text!r}")
        if now.ids[: len(before.ids)] != before.ids:
            now.problems.append(f"said {before.ids}, then {now.ids}")
    return now
