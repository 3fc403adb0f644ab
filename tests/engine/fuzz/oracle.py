"""Answers of an undisturbed stock server with room for all requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.engines.server.server import Server
from tests.engine.fuzz.actor import Answer, Question, ask
from tests.engine.serving import post

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
        if flush:
            post(self._server, "/flush_cache")
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            return list(pool.map(partial(ask, self._server.url), questions))
