"""A short slice of the fuzzer (`python -m tests.engine.fuzz`)."""

from __future__ import annotations

import json
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
from tests.engine.fuzz.judge import judge
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


# Events of the HTTP process, and of a scheduler.
LET_IN = {"event": "let in", "rids": ["a"]}
ASKED = {"event": "abort", "rid": "a", "all": False, "known": ["a"]}
ARRIVE = {"event": "arrive", "rid": "a"}
ABORT = {"event": "abort", "rid": "a", "all": False, "met": {}}
ALL = {"event": "abort", "rid": "", "all": True, "met": {}}
SWAPPED = {"event": "abort", "rid": "a", "all": False, "met": {"a": ["swapped", 5]}}
CHUNKED = {"event": "abort", "rid": "a", "all": False, "met": {"a": ["chunked", 0]}, "step": 3}
RETRACT = {"event": "pause", "mode": "retract", "step": 3}
LONG = {"event": "finish", "rid": "a", "reason": "length", "tokens": 50}
SHORT = {"event": "finish", "rid": "a", "reason": "length", "tokens": 7}


@pytest.mark.parametrize(
    ("events", "lost"),
    [
        ((ABORT, ARRIVE, LONG), "before it reached the scheduler"),
        ((ABORT, ARRIVE, SWAPPED, SHORT), ""),
        ((ARRIVE, SWAPPED, LONG), "while swapped, and said 45 more"),
        ((ARRIVE, CHUNKED, RETRACT, LONG), ""),  # SGLang itself loses this abort
        ((ARRIVE, CHUNKED, {**RETRACT, "step": 4}, LONG), "while chunked, and said 50 more"),
        ((ARRIVE, ABORT, LONG), "did not find it"),
        ((ARRIVE, LONG), "no abort reached"),
        ((ARRIVE, LONG, ABORT), ""),
        ((ALL, ABORT, ARRIVE, LONG), "before it reached the scheduler"),
    ],
)
def test_a_lost_abort_is_found(events: Sequence[Any], lost: str, tmp_path: Path) -> None:
    for name, lines in (("http", (LET_IN, ASKED)), ("scheduler-dp0-tp0", events)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in lines))
    findings = Evidence(tmp_path).findings()
    assert [lost in finding for finding in findings] == ([True] if lost else [])


@pytest.mark.parametrize(
    ("blockers", "is_found"),
    [
        ({"grammar": ["a"], "waiting turn": ["b"]}, False),  # SGLang's own reasons
        ({"grammar": ["a"], "waiting": ["b"]}, True),
        ({"chunked": ["a"]}, True),
        ({}, True),
    ],
)
def test_a_refused_flush_is_found(
    blockers: dict[str, list[str]], is_found: bool, tmp_path: Path
) -> None:
    event = {"event": "flush refused", "blockers": blockers}
    (tmp_path / "scheduler-dp0-tp0.jsonl").write_text(json.dumps(event))
    assert bool(Evidence(tmp_path).findings()) == is_found


class Undisturbed:
    """An oracle that says the same each time."""

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        return [self.alone(question) for question in questions]

    def alone(self, question: Question) -> Answer:
        return Answer(ids=[7, 8, 9, 9], finish="length")

    def margins(self, question: Question) -> list[float]:
        return [1.0, 1.0, 1e-5, 1.0]


@pytest.mark.parametrize(
    ("said", "finish", "sampling", "is_wrong"),
    [
        ([7, 8, 9, 9], "length", {}, False),
        ([7, 8, 1, 1], "length", {}, False),  # both tokens were as likely
        ([7, 1, 9, 9], "length", {}, True),
        ([7, 8], "length", {}, True),
        ([7, 8], "abort", {}, False),
        ([2], "abort", {}, True),
        ([2], "abort", {"regex": "[a-z]"}, False),  # the stub of a grammar in the making
        ([1] * 4, "stop", {"temperature": 1.0}, False),
        ([1] * 2, "length", {"temperature": 1.0}, True),
        ([1] * 5, "stop", {"temperature": 1.0}, True),
    ],
)
def test_a_wrong_answer_is_found(
    said: list[int], finish: str, sampling: dict[str, Any], is_wrong: bool
) -> None:
    turn = Turn(words=(), sampling={"temperature": 0, "max_new_tokens": 4, **sampling})
    talk = Talk("t", 0.0, Kind.CHAT, (), (turn,))
    outcome = Outcome(talk, turn, "a", Question("/generate", {}), 0.0)
    outcome.answers = [Answer(ids=said, finish=finish)]
    outcome.asked_to_abort = finish == "abort"
    oracle: Any = Undisturbed()
    assert bool(judge(Played([outcome], [], []), oracle).findings) == is_wrong
