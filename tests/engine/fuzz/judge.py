"""Checks that answers are right at any timing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.engines.server.server import Server
from tests.engine.fuzz.actor import Answer, Outcome, Played, Question, ask
from tests.engine.serving import post

# For log probabilities, whose last digits depend on the batch.
_TOLERANCE = 1e-3
_AT_A_TIME = 8


class Oracle:
    """Answers of an undisturbed stock server with room for all requests, each computed once. The
    server starts for the first answer."""

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
        """Ask again alone, with an empty cache, because a near tie may break the other way."""
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


def judge(played: Played, oracle: Oracle, counts: Counter[str]) -> list[str]:
    """Return the faults of an episode's answers. counts: gets the answers that were compared,
    aborted, left by their client, or uncertain because two undisturbed runs did not agree
    either."""
    findings = list(played.problems)
    known = oracle.answers([outcome.question for outcome in played.outcomes])
    for outcome, calm in zip(played.outcomes, known, strict=True):
        found = _judge_one(outcome, calm, _may_abort(outcome, played), counts)
        if found and _is_uncertain(outcome, calm, oracle):
            counts["uncertain"] += 1
        else:
            who = f"{outcome.rid} ({outcome.talk.kind.name}, {outcome.turn})"
            findings += [f"{problem}: {who}" for problem in found]
    return findings


def _is_uncertain(outcome: Outcome, calm: Answer, oracle: Oracle) -> bool:
    """Whether the undisturbed server now answers differently, or the fault began at a token that
    was hardly likelier than another. In a chat, for example, the KV of earlier answers is of decode
    steps, which round differently from a prefill."""
    again = oracle.alone(outcome.question)
    if (again.ids, again.text) != (calm.ids, calm.text):
        return True
    if (at := _first_difference(outcome.answer, calm)) is None:
        return False
    margins = oracle.margins(outcome.question)
    return at < len(margins) and margins[at] <= _TOLERANCE


def _may_abort(outcome: Outcome, played: Played) -> bool:
    return outcome.asked_to_abort or any(
        outcome.sent_s <= end and start <= outcome.ended_s for start, end in played.abort_windows
    )


def _judge_one(outcome: Outcome, calm: Answer, may_abort: bool, counts: Counter[str]) -> list[str]:
    answer = outcome.answer
    if calm.error:
        return [f"the undisturbed server says {calm.error}"]
    problems = [] if outcome.left else [*answer.problems]
    if answer.error:
        return problems if may_abort or outcome.left else [*problems, answer.error]
    if outcome.left and not answer.finish:
        counts["left"] += 1
        return problems + _not_a_start(answer, calm)
    if answer.finish == "abort":
        counts["aborted"] += 1
        if not may_abort:
            problems.append("aborted, though no client asked for it")
        # If a request is aborted while its grammar is being made, SGLang replaces its prompt by a
        # stub and runs it for one step (constrained/grammar_manager.py).
        is_stub = len(answer.ids) == 1 and "regex" in outcome.turn.sampling
        return problems if is_stub else problems + _not_a_start(answer, calm)
    if not answer.finish:
        return [*problems, "not answered to the end"]
    counts["compared"] += 1
    return problems + _differences(answer, calm)


def _not_a_start(answer: Answer, calm: Answer) -> list[str]:
    """Check that the text up to an abort is the beginning of the full answer."""
    if answer.ids == calm.ids[: len(answer.ids)]:
        return []
    return [f"said {answer.ids}, undisturbed {calm.ids}"]


def _differences(answer: Answer, calm: Answer) -> list[str]:
    if answer.ids != calm.ids:
        at = _first_difference(answer, calm)
        return [f"other tokens from place {at} on: {answer.ids}, undisturbed {calm.ids}"]
    problems = [
        f"{name} is {getattr(answer, name)}, undisturbed {getattr(calm, name)}"
        for name in ("text", "finish", "top_ids")
        if getattr(answer, name) != getattr(calm, name)
    ]
    for name in ("logprobs", "input_logprobs"):
        problems += _far(name, getattr(answer, name), getattr(calm, name))
    return problems


def _first_difference(answer: Answer, calm: Answer) -> int | None:
    """Return the place of the first different token; None if one answer begins with the other."""
    pairs = enumerate(zip(answer.ids, calm.ids, strict=False))
    return next((i for i, (said, wanted) in pairs if said != wanted), None)


def _far(what: str, found: Sequence[float], calm: Sequence[float]) -> list[str]:
    if len(found) != len(calm):
        return [f"{len(found)} {what}, undisturbed {len(calm)}"]
    largest = max((abs(a - b) for a, b in zip(found, calm, strict=True)), default=0.0)
    return [f"{what} differ by {largest:.2g}"] if largest > _TOLERANCE else []
