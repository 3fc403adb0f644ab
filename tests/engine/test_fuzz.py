"""A short slice of the fuzzer (`python -m tests.engine.fuzz`), and what its parts are worth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from patches.carrier import clients_hints
from tests.engine.fuzz.actor import Answer, Outcome, Played, Question
from tests.engine.fuzz.claims import draw_claims
from tests.engine.fuzz.configurations import CONFIGURATIONS
from tests.engine.fuzz.evidence import Evidence
from tests.engine.fuzz.judge import Verdict, judge
from tests.engine.fuzz.model import write_spelling_model
from tests.engine.fuzz.oracle import Oracle
from tests.engine.fuzz.scenario import Kind, Talk, Turn, draw
from tests.engine.fuzz.trial import Trial, calm_server

# Those of one slice share an undisturbed server.
SLICES = (("documents", "sage"), ("fickle",))


@pytest.fixture(scope="module")
def spelling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spelling_model(tmp_path_factory.mktemp("spelling"))


@pytest.mark.parametrize(
    "names", [SLICES[0], pytest.param(SLICES[1], marks=pytest.mark.long)], ids="-".join
)
def test_nothing_is_found(names: Sequence[str], spelling_model: Path, tmp_path: Path) -> None:
    oracle = Oracle(calm_server(CONFIGURATIONS[names[0]], spelling_model, tmp_path))
    try:
        for name in names:
            trial = Trial(CONFIGURATIONS[name], spelling_model, tmp_path, oracle)
            try:
                assert trial.episode(f"slice/{name}") == []
            finally:
                trial.stop()
            assert trial.tally.num_compared > 0
    finally:
        oracle.close()


def test_a_seed_is_a_scenario() -> None:
    for configuration in CONFIGURATIONS.values():
        one, same, other = (draw(seed, configuration.mix) for seed in ("1", "1", "2"))
        assert one == same != other


def test_what_clients_claim_is_allowed() -> None:
    for seed in range(200):
        clients_hints(draw_claims(random.Random(seed)).custom_params)


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def test_ranks_that_part_are_told(tmp_path: Path) -> None:
    first = '{"event": "batch", "step": 1, "mode": "EXTEND", "rids": ["a", "b"]}'
    second = '{"event": "batch", "step": 2, "mode": "DECODE", "rids": ["a", "b"]}'
    other = '{"event": "batch", "step": 2, "mode": "EXTEND", "rids": ["c"]}'
    write(tmp_path, "scheduler-dp0-tp0", first, second)
    # One that is behind, as it was ended a step earlier, has not parted.
    write(tmp_path, "scheduler-dp0-tp1", first)
    assert Evidence(tmp_path).findings() == []
    write(tmp_path, "scheduler-dp0-tp1", first, other)
    assert "part at their 1th batch" in Evidence(tmp_path).findings()[0]


# In the HTTP process, and in a scheduler.
LET_IN = '{"event": "let in", "rids": ["a"]}'
ASKED = '{"event": "abort", "rid": "a", "all": false, "known": ["a"]}'
ARRIVE = '{"event": "arrive", "rid": "a"}'
ABORT = '{"event": "abort", "rid": "a", "all": false, "met": {}}'
MET = '{"event": "abort", "rid": "a", "all": false, "met": {"a": ["swapped", 5]}}'
CHUNKED = '{"event": "abort", "rid": "a", "all": false, "met": {"a": ["chunked", 0]}, "step": 3}'
RETRACT = '{"event": "pause", "mode": "retract", "step": 3}'
LATER = '{"event": "pause", "mode": "retract", "step": 4}'
LONG = '{"event": "finish", "rid": "a", "reason": "length", "tokens": 50}'
SHORT = '{"event": "finish", "rid": "a", "reason": "length", "tokens": 7}'


def findings_of(folder: Path, http: Sequence[str], scheduler: Sequence[str]) -> list[str]:
    write(folder, "http", *http)
    write(folder, "scheduler-dp0-tp0", *scheduler)
    return Evidence(folder).findings()


@pytest.mark.parametrize(
    ("events", "lost"),
    [
        ((ABORT, ARRIVE, LONG), "before it reached the scheduler"),
        ((ABORT, ARRIVE, MET, SHORT), None),
        ((ARRIVE, MET, LONG), "while swapped, and said 45 more"),
        ((ARRIVE, CHUNKED, RETRACT, LONG), None),  # by SGLang itself
        ((ARRIVE, CHUNKED, LATER, LONG), "while chunked, and said 50 more"),
        ((ARRIVE, ABORT, LONG), "did not find it"),
        ((ARRIVE, LONG), "no abort reached"),
        ((ARRIVE, LONG, ABORT), None),
    ],
)
def test_an_abort_that_is_lost_is_told(
    events: tuple[str, ...], lost: str | None, tmp_path: Path
) -> None:
    findings = findings_of(tmp_path, (LET_IN, ASKED), events)
    assert (lost is None and findings == []) or (lost is not None and lost in findings[0])


ALL = '{"event": "abort", "rid": "", "all": true, "met": {}}'


@pytest.mark.parametrize(
    ("events", "lost"),
    [
        ((ALL, ARRIVE, LONG, ABORT), None),
        ((ALL, ABORT, ARRIVE, LONG), "before it reached the scheduler"),
        ((ALL, ALL, ARRIVE, LONG), "before it reached the scheduler"),
    ],
)
def test_those_that_come_later_are_not_meant_by_an_abort_of_all(
    events: tuple[str, ...], lost: str | None, tmp_path: Path
) -> None:
    all_before = '{"event": "abort", "rid": "", "all": true, "known": []}'
    findings = findings_of(tmp_path, (all_before, LET_IN, ASKED), events)
    assert (lost is None and findings == []) or (lost is not None and lost in findings[0])


class Undisturbed:
    """An oracle that says the same each time."""

    def __init__(self, ids: list[int], margins: list[float]) -> None:
        self._answer = Answer(ids=ids, finish="length")
        self._margins = margins

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        return [self._answer for _ in questions]

    def alone(self, question: Question) -> Answer:
        return self._answer

    def margins(self, question: Question) -> list[float]:
        return self._margins


def outcome(answer: Answer, talk: Talk | None = None, **sampling: Any) -> Outcome:
    """Return the request of a talk's only turn, or of one more turn."""
    turn = Turn(words=(), sampling={"temperature": 0, "max_new_tokens": 4, **sampling})
    talk = talk or Talk("t", 0.0, Kind.CHAT, (), (turn,))
    found = Outcome(talk, turn, "a", Question("/generate", {}), 0.0)
    found.answers = [answer]
    return found


def judged(calm_ids: list[int], margins: list[float], *outcomes: Outcome) -> Verdict:
    undisturbed: Any = Undisturbed(calm_ids, margins)
    return judge(Played([*outcomes], [], []), undisturbed)


@pytest.mark.parametrize(
    ("said", "margins", "is_wrong"),
    [
        ([7, 8, 1, 1], [1.0, 1.0, 1e-5, 1.0], False),
        ([7, 8, 1, 1], [1e-5, 1.0, 0.1, 1e-5], True),
        ([7, 8, 1, 1], [1.0], True),
        ([7, 8], [1e-5, 1e-5, 1e-5, 1e-5], True),  # too short
    ],
)
def test_a_near_tie_may_fall_either_way_and_nothing_else(
    said: list[int], margins: list[float], is_wrong: bool
) -> None:
    verdict = judged([7, 8, 9, 9], margins, outcome(Answer(ids=said, finish="length")))
    assert bool(verdict.findings) == is_wrong
    assert verdict.num_uncertain == (not is_wrong)


@pytest.mark.parametrize(
    ("said", "sampling", "is_wrong"),
    [
        ([2], {"regex": "[a-z]"}, False),  # a stub's
        ([2, 2], {"regex": "[a-z]"}, True),
        ([2], {}, True),
        ([7, 8], {}, False),
    ],
)
def test_what_is_said_up_to_an_abort_is_a_beginning_but_of_a_stub(
    said: list[int], sampling: dict[str, str], is_wrong: bool
) -> None:
    aborted = outcome(Answer(ids=said, finish="abort"), **sampling)
    aborted.asked_to_abort = True
    assert bool(judged([7, 8, 9, 9], [1.0] * 4, aborted).findings) == is_wrong


@pytest.mark.parametrize(
    ("num_tokens", "finish", "is_wrong"),
    [
        (4, "length", False),
        (4, "stop", False),  # the last that the cap allows was one that stops it
        (2, "stop", False),
        (2, "length", True),
        (5, "length", True),
        (5, "stop", True),
    ],
)
def test_of_what_was_sampled_the_length_and_the_reason_must_agree(
    num_tokens: int, finish: str, is_wrong: bool
) -> None:
    sampled = outcome(Answer(ids=[7] * num_tokens, finish=finish), temperature=1.0)
    assert bool(judged([], [], sampled).findings) == is_wrong


@pytest.mark.parametrize(
    ("kind", "grammar", "is_wrong"),
    [
        (Kind.BATCH, {"regex": "[a-z]"}, False),
        (Kind.BATCH, {}, True),
        (Kind.PLAIN, {"regex": "[a-z]"}, True),
    ],
)
def test_a_batch_may_fail_for_one_whose_grammar_was_aborted(
    kind: Kind, grammar: dict[str, str], is_wrong: bool
) -> None:
    talk = Talk("t", 0.0, kind, (), ())
    one = outcome(Answer(error="400"), talk)
    mate = outcome(Answer(error="400"), talk, **grammar)
    mate.asked_to_abort = True
    assert bool(judged([7], [1.0], one, mate).findings) == is_wrong


def test_an_answer_that_comes_twice_is_told(tmp_path: Path) -> None:
    end = '{"event": "finish", "rid": "a", "reason": "stop"}'
    write(tmp_path, "http", end, end)
    assert Evidence(tmp_path).findings() == ["a was answered 2 times"]
