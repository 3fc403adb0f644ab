"""Makes chat prompts from templates: fourteen kinds, most with a hint at the length of the answer.

Prompt number i is of kind i % 14 and always the same, so a number identifies a prompt
(bench/workloads/answer_lengths.json has the lengths of a real model's answers).
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, stable_hash

LENGTHS_FILE = Path(__file__).with_name("answer_lengths.json")

_WORDS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_FORMS: dict[str, dict[str, Any]] = _WORDS["forms"]
_TOPICS, _PEOPLE, _COUNTRIES = (_WORDS[name] for name in ("topics", "people", "countries"))
_PLACES = _WORDS["places"]


def prompt(number: int) -> tuple[str, str]:
    """Return the prompt of this number and its kind."""
    kind, make = list(_KINDS.items())[number % len(_KINDS)]
    text = make(random.Random(f"chat {number}"))
    return text[0].upper() + text[1:], kind


def prompts(number: int) -> list[tuple[str, str]]:
    """Return the first prompts, each text once: repeated texts are left out."""
    found: dict[str, str] = {}
    i = 0
    while len(found) < number:
        found.setdefault(*prompt(i))
        i += 1
    return list(found.items())


def prompts_hash(asked: list[tuple[str, str]]) -> str:
    """Return a hash of prompts and kinds. The file of lengths has it too, to show that they belong
    to these prompts."""
    return f"{stable_hash(json.dumps(asked)):016x}"


def answered() -> Workload:
    """Return the prompts in the file of lengths, each with the length of its first answer. Raises
    WorkloadError if the file belongs to other prompts."""
    known = json.loads(LENGTHS_FILE.read_text("ascii"))
    asked = prompts(known["num_prompts"])
    if prompts_hash(asked) != known["prompts_hash"]:
        raise WorkloadError(f"{LENGTHS_FILE.name} belongs to other prompts; make it again")
    requests = [
        WorkloadRequest(asked[int(number)][0], lengths[0], asked[int(number)][1])
        for number, lengths in known["lengths"].items()
    ]
    return Workload.split(requests, f"{len(requests)} prompts from templates, {known['about']}")


def generated(number: int, seed: int = 0) -> Workload:
    """Return prompts, each with the length of an answer to another prompt of its kind."""
    known = answered()
    lengths: dict[str, list[int]] = {}
    for request in (*known.history, *known.evaluation):
        lengths.setdefault(request.class_name, []).append(request.output_tokens)
    requests = [
        WorkloadRequest(text, of_kind[stable_hash(f"{seed} {text}") % len(of_kind)], kind)
        for text, kind in prompts(number)
        for of_kind in [lengths[kind]]
    ]
    return Workload.split(
        requests,
        f"{number} prompts from templates, lengths drawn from a real model's answers to others of "
        "their kind",
    )


def _filled(kind: str, rng: random.Random) -> str:
    """Return the form of a kind, with words drawn in the order in which they are listed."""
    (_, form), *slots = _FORMS[kind].items()
    words = {name: rng.choice(_WORDS.get(str(given), given)) for name, given in slots}
    return str(form).format(**words)


def _yes_or_no(rng: random.Random) -> str:
    first, second = rng.sample(_COUNTRIES, 2)
    how = rng.choice(("Answer yes or no.", "Answer yes or no, then say why.", ""))
    return f"Is {first} larger than {second}? {how}".strip()


def _question(rng: random.Random) -> str:
    detail, question = str(rng.choice(_WORDS["detail"])), str(rng.choice(_WORDS["questions"]))
    return detail.format(question.format(rng.choice(_TOPICS)))


def _summary(rng: random.Random) -> str:
    form = rng.choice(("one sentence", "three bullet points", "a short paragraph", "five words"))
    topic = rng.choice(_TOPICS)
    report = " ".join(_finding(rng, topic) for _ in range(rng.choice((4, 8, 14))))
    return f"Summarize the following report on {topic} in {form}.\n\n{report}"


def _translation(rng: random.Random) -> str:
    language = rng.choice(("French", "Spanish", "German", "Italian"))
    text = " ".join(
        f"I will meet {rng.choice(_PEOPLE)} at {rng.choice(_PLACES)} at {rng.randint(2, 11)}."
        for _ in range(rng.choice((1, 2, 4)))
    )
    return f"Translate into {language}: {text}"


def _rewriting(rng: random.Random) -> str:
    how = rng.choice(("more polite", "shorter", "more formal", "clearer", "much longer"))
    text = " ".join(_finding(rng, rng.choice(_TOPICS)) for _ in range(rng.choice((1, 3))))
    return f"Make this text {how}: {text}"


def _extraction(rng: random.Random) -> str:
    text = " ".join(_finding(rng, rng.choice(_TOPICS)) for _ in range(rng.choice((1, 3, 6))))
    what = rng.choice(("every year", "every number", "the subjects"))
    return f"Name {what} in this text, as a JSON list: {text}"


def _sum(rng: random.Random) -> str:
    many, more, price = rng.randint(3, 30), rng.randint(3, 30), rng.randint(2, 9)
    how = rng.choice(("Answer with the number alone.", "Show every step.", ""))
    return (
        f"Anna has {many} apples and buys {more} more; each costs {price} dollars. "
        f"What are all her apples worth? {how}"
    ).strip()


def _comparison(rng: random.Random) -> str:
    first, second = rng.sample(_TOPICS, 2)
    how = rng.choice((" Answer in one paragraph.", " Make a table.", ""))
    return f"What have {first} and {second} in common, and what not?{how}"


def _finding(rng: random.Random, topic: str) -> str:
    who = rng.choice(("The survey", "The committee", "A second team", "The registry"))
    found = rng.choice(("a steady rise in costs", "fewer complaints", "large regional differences"))
    return f"{who} reported {found} around {topic} in {rng.randint(1990, 2024)}."


_KINDS: dict[str, Callable[[random.Random], str]] = {
    "fact": partial(_filled, "fact"), "yes or no": _yes_or_no, "question": _question,
    "list": partial(_filled, "list"), "sentences": partial(_filled, "sentences"),
    "writing": partial(_filled, "writing"), "summary": _summary, "code": partial(_filled, "code"),
    "translation": _translation, "rewriting": _rewriting, "extraction": _extraction, "sum": _sum,
    "comparison": _comparison, "essay": partial(_filled, "essay"),
}  # fmt: skip
