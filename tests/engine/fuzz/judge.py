"""Whether the answers are right, under any timing."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from tests.engine.fuzz.actor import Answer, Outcome, Played
from tests.engine.fuzz.oracle import Oracle
from tests.engine.fuzz.scenario import COUNTED, GRAMMARS, Kind, Turn

# Of a log probability: who is decoded together changes its last digits.
_TOLERANCE = 1e-3


@dataclass(slots=True)
class Verdict:
    """The faults in an episode's answers, and the number of comparisons.

    num_uncertain: comparisons of which two undisturbed runs differed too, or in which SGLang
        retracted a request whose tokens it counts.
    """

    findings: list[str]
    num_compared: int = 0
    num_uncertain: int = 0
    num_aborted: int = 0
    num_left: int = 0


def judge(played: Played, oracle: Oracle, lost_kv: Set[str] = frozenset()) -> Verdict:
    """lost_kv: see Evidence.lost_kv."""
    verdict = Verdict(list(played.problems))
    compared = [outcome for outcome in played.outcomes if not outcome.turn.sampled]
    calm = dict(
        zip(
            [outcome.rid for outcome in compared],
            oracle.answers([outcome.question for outcome in compared]),
            strict=True,
        )
    )
    for outcome in played.outcomes:
        wanted = calm.get(outcome.rid)
        counts = not COUNTED.isdisjoint(outcome.turn.sampling)
        if counts and not lost_kv.isdisjoint(answer.rid for answer in outcome.answers):
            verdict.num_uncertain += 1
            wanted = None
        found = _judge_one(outcome, wanted, _may_abort(outcome, played), verdict)
        if found and outcome.rid in calm:
            again = oracle.alone(outcome.question)
            known = calm[outcome.rid]
            if (again.ids, again.text) != (known.ids, known.text) or _near_tie(
                outcome, known, oracle
            ):
                verdict.num_uncertain += 1
                continue
        verdict.findings += [f"{_who(outcome)}: {problem}" for problem in found]
    return verdict


def _near_tie(outcome: Outcome, calm: Answer, oracle: Oracle) -> bool:
    """Whether all differences began at a token that was hardly likelier than another. In a chat,
    for example, the KV of earlier answers comes from decode steps, which round it differently than
    a prefill does."""
    if outcome.talk.kind is Kind.MESSAGES:
        return False
    margins = None
    for answer in outcome.answers:
        if (at := _first_difference(answer, calm)) is None:
            continue
        margins = oracle.margins(outcome.question) if margins is None else margins
        if at >= len(margins) or margins[at] > _TOLERANCE:
            return False
    return margins is not None


def _may_abort(outcome: Outcome, played: Played) -> bool:
    if outcome.talk.kind is Kind.BATCH and any(
        mate.asked_to_abort and not GRAMMARS.isdisjoint(mate.turn.sampling)
        for mate in played.outcomes
        if mate.talk is outcome.talk
    ):
        # An abort that meets a grammar in the making is a bad request to SGLang, and one bad
        # request fails its whole batch (managers/tokenizer_manager.py).
        return True
    return outcome.asked_to_abort or any(
        outcome.sent_s <= end and start <= outcome.ended_s for start, end in played.abort_windows
    )


def _who(outcome: Outcome) -> str:
    turn = outcome.turn
    how = [
        outcome.talk.kind.name.lower(),
        f"{len(turn.words)} new tokens",
        str(dict(turn.sampling)),
    ]
    how += ["streamed"] * turn.stream + [f"n={turn.num_samples}"] * (turn.num_samples > 1)
    return f"{outcome.rid} ({', '.join(how)})"


def _judge_one(
    outcome: Outcome, calm: Answer | None, may_abort: bool, verdict: Verdict
) -> list[str]:
    problems: list[str] = []
    turn = outcome.turn
    if not outcome.left and len(outcome.answers) != turn.num_samples:
        problems.append(f"{len(outcome.answers)} answers")
    if calm is not None and calm.error:
        return [f"the undisturbed server says {calm.error}"]
    for answer in outcome.answers:
        problems += answer.problems if not outcome.left else []
        if answer.error:
            if not (may_abort or outcome.left):
                problems.append(answer.error)
        elif outcome.left and not answer.finish:
            verdict.num_left += 1
            problems += _not_a_start(answer, calm)
        elif answer.finish == "abort":
            verdict.num_aborted += 1
            if not may_abort:
                problems.append("aborted, though nobody asked for it")
            if not _was_stubbed(turn, answer):
                problems += _not_a_start(answer, calm)
        elif not answer.finish:
            problems.append("not answered to the end")
        elif calm is not None:
            verdict.num_compared += 1
            problems += _differences(answer, calm)
        elif outcome.talk.kind is not Kind.MESSAGES:
            cap = turn.sampling["max_new_tokens"]
            # A token that stops it may be the last that the cap allows: SGLang says "stop" then.
            is_short = len(answer.ids) < cap
            if len(answer.ids) > cap or (answer.finish == "length" and is_short):
                problems.append(f"{len(answer.ids)} of at most {cap} tokens, {answer.finish}")
    return problems


def _was_stubbed(turn: Turn, answer: Answer) -> bool:
    """Whether its token means nothing: if an abort meets a request whose grammar is being made,
    SGLang puts a stub in its prompt's place and lets it make one step without a grammar
    (constrained/grammar_manager.py)."""
    return len(answer.ids) == 1 and not GRAMMARS.isdisjoint(turn.sampling)


def _not_a_start(answer: Answer, calm: Answer | None) -> list[str]:
    """The text up to an abort has to be the beginning of the full answer."""
    if calm is None or answer.ids == calm.ids[: len(answer.ids)]:
        return []
    return [f"said {answer.ids}, undisturbed {calm.ids}"]


def _differences(answer: Answer, calm: Answer) -> list[str]:
    if answer.ids != calm.ids:
        at = _first_difference(answer, calm)
        where = "the end of one" if at is None else at
        return [f"other tokens from {where} on: {answer.ids}, undisturbed {calm.ids}"]
    problems = []
    if answer.text != calm.text:
        problems.append(f"other text: {answer.text!r}, undisturbed {calm.text!r}")
    if answer.finish != calm.finish:
        problems.append(f"ended by {answer.finish}, undisturbed by {calm.finish}")
    if answer.top_ids != calm.top_ids:
        problems.append(f"top tokens {answer.top_ids}, undisturbed {calm.top_ids}")
    for what in ("logprobs", "input_logprobs"):
        problems += _far(what, getattr(answer, what), getattr(calm, what))
    return problems


def _first_difference(answer: Answer, calm: Answer) -> int | None:
    """The place of the first different token; None if one answer begins with the other."""
    pairs = enumerate(zip(answer.ids, calm.ids, strict=False))
    return next((i for i, (said, wanted) in pairs if said != wanted), None)


def _far(what: str, found: Sequence[float], calm: Sequence[float]) -> list[str]:
    if len(found) != len(calm):
        return [f"{len(found)} {what}, undisturbed {len(calm)}"]
    largest = max((abs(a - b) for a, b in zip(found, calm, strict=True)), default=0.0)
    return [f"{what} differ by {largest:.2g}"] if largest > _TOLERANCE else []
