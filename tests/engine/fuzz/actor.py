"""Plays a scenario against a server, and collects the answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.engine.fuzz.claims import Claims
from tests.engine.fuzz.scenario import (
    Disturbance,
    Kind,
    Scenario,
    Talk,
    Trouble,
    Turn,
    spelled,
)

# If nothing came back after this number of looks, a second apart, the server is stuck.
# Counted, as a clock goes on while this process and the server are stopped.
_STALLED_LOOKS = 150
_GENERATE = "/generate"
_SETTINGS = "/sage/settings"
_UPDATE = "/update_weights_from_disk"
# These counters are read while requests come and go.
_COUNTS = ("/server_info", "/metrics", "/v1/loads")
_NOT_FLUSHED = "the cache was not flushed"
_REFUSED_FLUSHES = (_NOT_FLUSHED, "Flush cache failed")
# Fields of a batch, which are lists, and what they have where a request says nothing.
_OF_A_BATCH: dict[str, Any] = {
    "input_ids": None, "sampling_params": None, "return_logprob": False, "logprob_start_len": -1,
    "top_logprobs_num": 0,
}  # fmt: skip
_PAUSES = {Trouble.PAUSE_ABORT: "abort", Trouble.PAUSE_IN_PLACE: "in_place"}
# What a SWITCH goes back to, beside the policy.
_CALM = {"preemption": {"enabled": True}, "decode": {"max_gap_ms": 1000.0}}


class StalledError(RuntimeError):
    """Nothing comes back from the server any more."""


# The body of a request, without the way in which the answer comes.
Question = Mapping[str, Any]


@dataclass(slots=True)
class Answer:
    """The answer of one sample. rid: the sample's own. margins: for each token, the log probability
    of the first choice less that of the second. problems: errors of the stream itself."""

    text: str = ""
    rid: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str = ""  # "" until it ends
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    num_retractions: int = 0
    error: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """A turn and its answers. ended_s: when the answer was complete, the client gone, or never."""

    talk: Talk
    turn: Turn
    rid: str
    question: Question
    sent_s: float = field(default_factory=time.monotonic)
    ended_s: float = math.inf
    left: bool = False
    asked_to_abort: bool = False
    answers: list[Answer] = field(default_factory=list)


@dataclass(slots=True)
class Played:
    """An episode. abort_windows: when all requests were told to end."""

    outcomes: list[Outcome]
    abort_windows: list[tuple[float, float]]
    problems: list[str]


class Actor:
    """One episode's clients. prefix: begins their requests' ids. policy: the server's, except
    during switches."""

    def __init__(self, url: str, model_path: str, policy: str, prefix: str) -> None:
        self._url, self._model_path = url, model_path
        self._policy, self._prefix = policy, prefix
        self._started_s = self._heard_s = 0.0
        self._http: aiohttp.ClientSession | None = None
        self.played = Played([], [], [])

    async def play(self, scenario: Scenario) -> None:
        """Raises StalledError. What was played so far is in `played`."""
        # A server closes connections that are idle, some just as they are used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._http:
            self._started_s = self._heard_s = time.monotonic()
            tasks = [
                asyncio.create_task(act)
                for act in (
                    *map(self._talk, scenario.talks),
                    self._operator(scenario.troubles),
                    self._operator(scenario.switches),
                )
            ]
            try:
                num_looks = 0
                while not all(task.done() for task in tasks):
                    heard_s = self._heard_s
                    await asyncio.wait(tasks, timeout=1.0)
                    num_looks = num_looks + 1 if heard_s == self._heard_s else 0
                    if num_looks > _STALLED_LOOKS:
                        raise StalledError(f"nothing came back in {_STALLED_LOOKS} s")
            finally:
                for task in tasks:
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                self.played.problems += [
                    f"a client failed: {error!r}" for error in found if isinstance(error, Exception)
                ]

    async def _wait(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, self._started_s + at_s - time.monotonic()))

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and JSON, or text, of a call; of a GET without a body."""
        assert self._http is not None
        method = "GET" if body is None else "POST"
        async with self._http.request(
            method, self._url + path, json=body, headers=headers
        ) as response:
            text = await response.text()
            self._heard_s = time.monotonic()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text

    async def _operator(self, disturbances: Sequence[Disturbance]) -> None:
        for disturbance in disturbances:
            await self._wait(disturbance.at_s)
            started_s = time.monotonic()
            await self._disturb(disturbance)
            if disturbance.trouble in (Trouble.ABORT_ALL, Trouble.PAUSE_ABORT):
                self.played.abort_windows.append((started_s, time.monotonic()))

    async def _disturb(self, disturbance: Disturbance) -> None:
        trouble = disturbance.trouble
        update = {"model_path": self._model_path}
        if trouble is Trouble.FLUSH:
            await self._post("/flush_cache", {})  # refused while there are requests
        elif trouble is Trouble.ABORT_ALL:
            await self._post("/abort_request", {"abort_all": True})
        elif trouble is Trouble.UPDATE:
            # SGLang waits until all clients have their answers or have gone
            # (managers/tokenizer_manager.py). If a request still runs whose client has gone, it
            # cannot flush its cache, and the call fails
            # (managers/scheduler_components/weight_updater.py).
            status, found = await self._post(_UPDATE, update)
            gone = any(each.left or each.asked_to_abort for each in self.played.outcomes)
            if status != 200 and not (gone and _NOT_FLUSHED in str(found)):
                self.played.problems.append(f"{_UPDATE} gave {status}: {found}")
        elif trouble is Trouble.LOOK:
            for path in _COUNTS:
                await self._demand(path, None)
        elif trouble is Trouble.SWITCH:
            await self._demand(_SETTINGS, disturbance.settings)
            await asyncio.sleep(disturbance.for_s)
            await self._demand(_SETTINGS, {"schedule_policy": self._policy, **_CALM})
        else:
            await self._demand("/pause_generation", {"mode": _PAUSES.get(trouble, "retract")})
            # The witness says whether a refusal to flush is right (evidence.py).
            if trouble is Trouble.RETRACT_AND_FLUSH:
                await self._demand("/flush_cache", {}, refusals=_REFUSED_FLUSHES)
            elif trouble is Trouble.RETRACT_AND_UPDATE:
                await self._demand(_UPDATE, update, refusals=_REFUSED_FLUSHES)
            await asyncio.sleep(disturbance.for_s)
            await self._demand("/continue_generation", {})

    async def _demand(
        self, path: str, body: Mapping[str, Any] | None, refusals: Sequence[str] = ()
    ) -> Any:
        """The answer of a call that has to succeed, but for these refusals."""
        status, found = await self._post(path, body)
        if status != 200 and not any(refusal in str(found) for refusal in refusals):
            self.played.problems.append(f"{path} {body} gave {status}: {found}")
        return found

    async def _talk(self, talk: Talk) -> None:
        await self._wait(talk.at_s)
        if talk.kind is Kind.BATCH:
            await self._batch(talk)
            return
        session = None
        in_tree = f"{self._prefix}-{talk.name}" if talk.kind is Kind.CHAT else None
        if talk.kind in (Kind.SESSION, Kind.STREAMING_SESSION):
            streaming = talk.kind is Kind.STREAMING_SESSION
            opening = {"capacity_of_str_len": 100_000, "streaming": streaming}
            session = await self._demand("/open_session", opening)
        said = list(talk.opening)
        for i, turn in enumerate(talk.turns):
            await asyncio.sleep(turn.pause_s if i else 0.0)
            rid = f"{self._prefix}-{talk.name}-{i}"
            said += turn.words
            extra: dict[str, Any] = {"rid": rid, "session_id": in_tree}
            if session is not None:
                extra["session_params"] = {"id": session}
                if i and talk.kind is Kind.SESSION:
                    extra["session_params"]["rid"] = f"{self._prefix}-{talk.name}-{i - 1}"
                if i:
                    extra["input_ids"] = list(turn.words)
            outcome = Outcome(talk, turn, rid, _question(turn, said))
            self.played.outcomes.append(outcome)
            await self._ask(outcome, extra)
            answer = outcome.answers[0] if outcome.answers else Answer()
            if answer.finish not in ("stop", "length"):
                break
            said = list(talk.opening) if talk.kind is Kind.PLAIN else [*said, *answer.ids]
        if (session := session or in_tree) is not None:
            await self._demand("/close_session", {"session_id": session})

    async def _batch(self, talk: Talk) -> None:
        outcomes = [
            Outcome(
                talk,
                turn,
                f"{self._prefix}-{talk.name}-{i}",
                _question(turn, [*talk.opening, *turn.words]),
                asked_to_abort=turn.leave is not None,
            )
            for i, turn in enumerate(talk.turns)
        ]
        self.played.outcomes += outcomes
        bodies = [_claimed(each.question, each.turn.claims) for each in outcomes]
        body: dict[str, Any] = {
            name: [one.get(name, default) for one in bodies]
            for name, default in _OF_A_BATCH.items()
        }
        body["rid"] = [outcome.rid for outcome in outcomes]
        leaving = [asyncio.create_task(self._abort(outcome)) for outcome in outcomes]
        try:
            status, found = await self._post(_GENERATE, body, talk.turns[0].claims.headers)
        except aiohttp.ClientError as error:
            status, found = 0, repr(error)
        finally:
            for task in leaving:
                task.cancel()
        is_whole = status == 200 and isinstance(found, list) and len(found) == len(outcomes)
        for i, outcome in enumerate(outcomes):
            outcome.ended_s = time.monotonic()
            failed = Answer(error=f"{status}: {str(found)[:300]}")
            outcome.answers = [_heard(found[i]) if is_whole else failed]

    async def _abort(self, outcome: Outcome) -> None:
        leave = outcome.turn.leave
        if leave is not None and not leave.closes:
            await asyncio.sleep(leave.after_s)
            outcome.asked_to_abort = True
            with contextlib.suppress(aiohttp.ClientError):
                await self._post("/abort_request", {"rid": outcome.rid})

    async def _ask(self, outcome: Outcome, extra: Mapping[str, Any]) -> None:
        leave = outcome.turn.leave
        aborting = asyncio.create_task(self._abort(outcome))
        answering = asyncio.create_task(self._answer(outcome, extra))
        try:
            if leave is not None and leave.closes:
                _, pending = await asyncio.wait([answering], timeout=leave.after_s)
                outcome.left = bool(pending)
            else:
                await asyncio.wait([answering])
        finally:
            for task in (answering, aborting):
                task.cancel()
            found = await asyncio.gather(answering, aborting, return_exceptions=True)
        outcome.ended_s = time.monotonic()
        if isinstance(found[0], Exception):
            outcome.answers = [Answer(error=repr(found[0])[:300])]

    async def _answer(self, outcome: Outcome, extra: Mapping[str, Any]) -> None:
        turn, question = outcome.turn, outcome.question
        body = _claimed({**question, **extra, "stream": turn.stream}, turn.claims)
        if turn.num_samples > 1:
            body["sampling_params"] = {**body["sampling_params"], "n": turn.num_samples}
        assert self._http is not None
        async with self._http.post(
            self._url + _GENERATE, json=body, headers=turn.claims.headers
        ) as response:
            if response.status == 200 and turn.stream:
                outcome.answers = [Answer() for _ in range(turn.num_samples)]
                await self._listen(outcome, response)
            else:
                outcome.answers = await _read(response)
        self._heard_s = time.monotonic()

    async def _listen(self, outcome: Outcome, response: aiohttp.ClientResponse) -> None:
        """Follow a stream to its end."""
        done = False
        async for line in _lines(response):
            self._heard_s = time.monotonic()
            if done:
                outcome.answers[0].problems.append("something came after the end of the stream")
            if line == "[DONE]":
                done = True
                continue
            chunk = json.loads(line)
            if "error" in chunk:
                outcome.answers[0].error = str(chunk)[:300]
            else:
                _follow(outcome.answers[chunk.get("index") or 0], chunk)
        if not done:
            outcome.answers[0].problems.append("the stream has no end")


async def ask(http: aiohttp.ClientSession, url: str, question: Question) -> Answer:
    """One plain answer. Raises aiohttp.ClientError."""
    async with http.post(url + _GENERATE, json=question) as response:
        return (await _read(response))[0]


async def _read(response: aiohttp.ClientResponse) -> list[Answer]:
    if response.status != 200:
        return [Answer(error=f"{response.status}: {(await response.text())[:300]}")]
    found = await response.json()
    return [_heard(part) for part in (found if isinstance(found, list) else [found])]


def _question(turn: Turn, prompt: Sequence[int]) -> Question:
    said = {"text": spelled(prompt)} if turn.as_text else {"input_ids": [*prompt]}
    return {"sampling_params": {**turn.sampling}, **said, **turn.logprobs}


def _claimed(body: Mapping[str, Any], claims: Claims) -> dict[str, Any]:
    """A request's body with what its client says of its importance."""
    said = {"custom_params": {**claims.custom_params}} if claims.custom_params else {}
    priority = {} if claims.priority is None else {"priority": claims.priority}
    return {**body, **priority, "sampling_params": {**body["sampling_params"], **said}}


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of a stream's events."""
    rest = b""
    async for part in response.content.iter_any():
        *whole, rest = (rest + part).split(b"\n\n")
        for line in whole:
            yield line.removeprefix(b"data: ").decode()


def _heard(found: Mapping[str, Any]) -> Answer:
    meta = found["meta_info"]
    return Answer(
        text=found.get("text") or "",
        rid=meta["id"],
        ids=list(found.get("output_ids") or []),
        finish=(meta.get("finish_reason") or {}).get("type", ""),
        logprobs=[one[0] for one in meta.get("output_token_logprobs") or []],
        input_logprobs=[one[0] or 0.0 for one in meta.get("input_token_logprobs") or []],
        top_ids=[one[0][1] if one else -1 for one in meta.get("output_top_logprobs") or []],
        margins=[
            one[0][0] - one[1][0] if len(one or ()) > 1 else math.inf
            for one in meta.get("output_top_logprobs") or []
        ],
        num_retractions=meta.get("num_retractions", 0),
    )


def _follow(answer: Answer, chunk: Mapping[str, Any]) -> None:
    """A chunk of /generate, which has all that was said so far."""
    now = _heard(chunk)
    if answer.finish:
        answer.problems.append("the answer went on after its end")
    if now.finish != "abort":
        if not now.text.startswith(answer.text) and now.finish != "stop":
            answer.problems.append(f"said {answer.text!r}, then {now.text!r}")
        if now.ids[: len(answer.ids)] != answer.ids and now.finish != "stop":
            answer.problems.append(f"said {answer.ids}, then {now.ids}")
    for name in Answer.__slots__:
        if name not in ("problems", "error"):
            setattr(answer, name, getattr(now, name))
