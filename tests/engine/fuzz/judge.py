"""Whether the answers are right, under any timing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.engine.fuzz.actor import Answer, Outcome, Played
from tests.engine.fuzz.oracle import Oracle
from tests.engine.fuzz.scenario import GRAMMARS, Kind

# Of a log probability: who is decoded together changes its last digits.
_TOLERANCE = 1e-3


@dataclass(slots=True)
class Verdict:
    """The faults of an episode's answers. counts: answers that were compared, aborted, left by
    their client, or uncertain: two undisturbed runs did not agree either."""

    findings: list[str]
    counts: Counter[str] = field(default_factory=Counter)


def judge(played: Played, oracle: Oracle) -> Verdict:
    verdict = Verdict(list(played.problems))
    compared = [outcome for outcome in played.outcomes if not outcome.turn.sampled]
    known = oracle.answers([outcome.question for outcome in compared])
    calm = {outcome.rid: answer for outcome, answer in zip(compared, known, strict=True)}
    for outcome in played.outcomes:
        wanted, may_abort = calm.get(outcome.rid), _may_abort(outcome, played)
        found = _judge_one(outcome, wanted, may_abort, verdict.counts)
        if found and outcome.rid in calm and _is_uncertain(outcome, calm[outcome.rid], oracle):
            verdict.counts["uncertain"] += 1
        else:
            who = f"{outcome.rid} ({outcome.talk.kind.name}, {outcome.turn})"
            verdict.findings += [f"{problem}: {who}" for problem in found]
    return verdict


def _is_uncertain(outcome: Outcome, calm: Answer, oracle: Oracle) -> bool:
    """Whether the undisturbed server says another thing by now, or all that is wrong began at a
    token that was hardly likelier than another. In a chat, say, the KV of what was said before is
    of decode steps, in which it is rounded otherwise than in a prefill."""
    again = oracle.alone(outcome.question)
    if (again.ids, again.text) != (calm.ids, calm.text):
        return True
    parted = [_first_difference(answer, calm) for answer in outcome.answers]
    places = [at for at in parted if at is not None]
    margins = oracle.margins(outcome.question) if places else []
    return bool(places) and all(at < len(margins) and margins[at] <= _TOLERANCE for at in places)


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


def _judge_one(
    outcome: Outcome, calm: Answer | None, may_abort: bool, counts: Counter[str]
) -> list[str]:
    turn, problems = outcome.turn, list[str]()
    if calm is not None and calm.error:
        return [f"the undisturbed server says {calm.error}"]
    if not outcome.left:
        problems += [problem for answer in outcome.answers for problem in answer.problems]
        if len(outcome.answers) != turn.num_samples:
            problems.append(f"{len(outcome.answers)} answers")
    for answer in outcome.answers:
        if answer.error:
            problems += [] if may_abort or outcome.left else [answer.error]
        elif outcome.left and not answer.finish:
            counts["left"] += 1
            problems += _not_a_start(answer, calm)
        elif answer.finish == "abort":
            counts["aborted"] += 1
            problems += [] if may_abort else ["aborted, though no client asked for it"]
            # If an abort meets a request whose grammar is being made, SGLang puts a stub in its
            # prompt's place and lets it make one step (constrained/grammar_manager.py).
            if len(answer.ids) != 1 or GRAMMARS.isdisjoint(turn.sampling):
                problems += _not_a_start(answer, calm)
        elif not answer.finish:
            problems.append("not answered to the end")
        elif calm is not None:
            counts["compared"] += 1
            problems += _differences(answer, calm)
        else:
            cap = turn.sampling["max_new_tokens"]
            # A token that stops it may be the last that the cap allows: SGLang says "stop" then.
            is_short = len(answer.ids) < cap
            if len(answer.ids) > cap or (answer.finish == "length" and is_short):
                problems.append(f"{len(answer.ids)} of at most {cap} tokens, {answer.finish}")
    return problems


def _not_a_start(answer: Answer, calm: Answer | None) -> list[str]:
    """The text up to an abort has to be the beginning of the full answer."""
    if calm is None or answer.ids == calm.ids[: len(answer.ids)]:
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
    """The place of the first different token; None if one answer begins with the other."""
    pairs = enumerate(zip(answer.ids, calm.ids, strict=False))
    return next((i for i, (said, wanted) in pairs if said != wanted), None)


def _far(what: str, found: Sequence[float], calm: Sequence[float]) -> list[str]:
    if len(found) != len(calm):
        return [f"{len(found)} {what}, undisturbed {len(calm)}"]
    largest = max((abs(a - b) for a, b in zip(found, calm, strict=True)), default=0.0)
    return [f"{what} differ by {largest:.2g}"] if largest > _TOLERANCE else []
