"""Answers of an undisturbed stock server with room for all requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import aiohttp

from bench.engines.server.server import Server
from tests.engine.fuzz.actor import Answer, Question, ask

_AT_A_TIME = 8


class Oracle:
    """Answers of one server, each computed once. The server starts for the first answer."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[str, Answer] = {}

    def close(self) -> None:
        """End its server."""
        self._server.kill()

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """Return the answers in the order of the questions."""
        keys = [json.dumps(question, sort_keys=True) for question in questions]
        new = dict(zip(keys, questions, strict=True))
        new = {key: question for key, question in new.items() if key not in self._known}
        if new:
            found = self._ask(list(new.values()))
            self._known |= dict(zip(new, found, strict=True))
        return [self._known[key] for key in keys]

    def alone(self, question: Question) -> Answer:
        """Ask again alone, with an empty cache: a near tie may break the other way."""
        return self._ask([question], flush=True)[0]

    def margins(self, question: Question) -> list[float]:
        """Return each token's margin over the next likeliest, in log probability."""
        return self.alone({**question, "return_logprob": True, "top_logprobs_num": 2}).margins

    def _ask(self, questions: Sequence[Question], flush: bool = False) -> list[Answer]:
        if not self._server.running():
            self._server.__enter__()
        return asyncio.run(self._ask_all(questions, flush))

    async def _ask_all(self, questions: Sequence[Question], flush: bool) -> list[Answer]:
        slots = asyncio.Semaphore(_AT_A_TIME)

        async def one(question: Question) -> Answer:
            async with slots:
                return await ask(http, self._server.url, question)

        timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            if flush:
                async with http.post(f"{self._server.url}/flush_cache") as response:
                    response.raise_for_status()
            return await asyncio.gather(*map(one, questions))
