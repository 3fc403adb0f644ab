"""A mixed workload made from templates, where no data folder is given.

Lengths are log-normal within a cell that the prompt's text shows (how much is asked for, about
what), around class means that are published; so a predictor gains something, and never everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest

T = TypeVar("T")

# Mean answer lengths in tokens.
# Chat: ShareGPT's mean output, 337.99 (Kwon et al., PagedAttention, SOSP 2023, figure 11).
CHAT_MEAN_TOKENS = 338.0
# Summarization: LongBench's mean output, 90.7 (Zhong et al., DistServe, OSDI 2024, figure 7). Its
# inputs, 1738 tokens in the mean, are shortened to some 400, or two CPU cores do nothing else.
SUMMARY_MEAN_TOKENS = 90.7
# Writing: models do not write more than about 2,000 words however many are asked for (Bai et al.,
# LongWriter, arXiv 2408.07055, section 2); a word is about 4/3 tokens.
MAX_WRITING_WORDS = 2000
TOKENS_PER_WORD = 4 / 3
# What no prompt tells: standard deviation of the logarithm within a cell. Our choice; answers to
# one prompt at temperature 0.6 spread about that much (SageSched figure 1a).
NOISE = 0.4
# The heavy-tailed workload; our choice.
LIGHT_MEAN_TOKENS = 50.0
HEAVY_SHARE = 0.1
HEAVY_FACTOR = 20
HEAVY_NOISE = 0.2

_CHAT_DETAIL = {
    "In one sentence, {}": 0.15,
    "{} Keep it short.": 0.4,
    "{}": 1.0,
    "{} Explain step by step and give examples.": 1.8,
    "{} I want a thorough answer with all the background.": 2.4,
}
_CHAT_QUESTIONS = (
    "what is the most common mistake people make with {}?",
    "how does {} work?",
    "why would {} need {}?",
    "how do I explain {} to {}?",
    "what should {} know about {} before starting?",
    "compare {} with what was usual ten years ago.",
)
_SUMMARY_FORMS = {
    "one sentence": 0.35,
    "three bullet points": 0.8,
    "a short paragraph": 1.0,
    "a paragraph for each finding": 1.9,
}
_WRITING_KINDS = (
    "blog post", "eulogy", "short story", "grant proposal", "speech", "product page", "lesson plan",
    "press release", "travel guide", "letter to the editor",
)  # fmt: skip
_WRITING_WORDS = (100, 150, 200, 300, 500, 800, 1200, 2500)
# How the length varies with the subject, whatever is asked: some subjects are wordier.
_TOPICS = {
    "sourdough baking": 0.8, "tax returns": 1.1, "black holes": 1.2, "index funds": 1.0,
    "garden irrigation": 0.8, "SQL joins": 1.3, "marathon training": 1.0, "roof insulation": 0.9,
    "chess openings": 1.0, "jazz harmony": 1.1, "heat pumps": 1.0, "wills and inheritance": 1.2,
    "bird migration": 0.9, "sleep apnea": 1.1, "Python decorators": 1.3, "tea ceremonies": 0.8,
    "bicycle gears": 0.7, "vaccine trials": 1.2, "coral reefs": 0.9, "bond yields": 1.0,
    "home networks": 1.2, "watercolour": 0.7, "steam engines": 1.0, "allergies": 0.9,
}  # fmt: skip
_PEOPLE = (
    "a ten-year-old", "my grandmother", "a new colleague", "a nervous customer", "a city council",
    "first-year students", "an impatient manager", "two friends who disagree", "a night nurse",
    "a retired engineer", "a class of beginners", "a visitor from abroad",
)  # fmt: skip
_SUBJECTS = (
    "The survey", "The committee", "A second team", "The control group", "The registry",
    "An earlier study", "The field office", "The pilot project",
)  # fmt: skip
_VERBS = (
    "reported", "could not confirm", "measured", "found little evidence of", "documented",
    "expected", "recommended", "questioned",
)  # fmt: skip
_OBJECTS = (
    "a steady rise in costs", "fewer complaints than before", "large regional differences",
    "a weak effect of training", "delays in the supply of parts", "better long-term results",
    "an unexplained gap in the records", "growing interest among members",
)  # fmt: skip


def generate(num_prompts: int, seed: int) -> Workload:
    """About num_prompts distinct prompts, as many of each class. The same for the same seed."""
    rng = np.random.default_rng(seed)
    requests: dict[str, WorkloadRequest] = {}
    for make in (_chat, _summarization, _writing):
        made = _distinct(make, num_prompts // 3, rng)
        requests |= {request.prompt: request for request in made}
    return Workload.split(
        requests.values(),
        f"generated from templates (seed {seed}): chat, summarization and document writing, "
        "log-normal lengths around published means",
    )


def generate_heavy_tailed(num_prompts: int, seed: int) -> Workload:
    """Chat prompts with short answers, but for one in ten, which is HEAVY_FACTOR times longer.

    No prompt tells which one (reasoning models, that think for long or not at all)."""
    rng = np.random.default_rng(seed)

    def make(rng: np.random.Generator) -> WorkloadRequest:
        heavy = rng.random() < HEAVY_SHARE
        mean_tokens = LIGHT_MEAN_TOKENS * (HEAVY_FACTOR if heavy else 1)
        length = _noisy(rng, mean_tokens, HEAVY_NOISE)
        # One class: of several, as many are drawn of each.
        return WorkloadRequest(_chat(rng).prompt, length, "chat")

    return Workload.split(
        _distinct(make, num_prompts, rng),
        f"generated from templates (seed {seed}): chat with answers of about "
        f"{LIGHT_MEAN_TOKENS:g} tokens, a tenth of them {HEAVY_FACTOR} times longer",
    )


def _distinct(
    make: Callable[[np.random.Generator], WorkloadRequest], number: int, rng: np.random.Generator
) -> list[WorkloadRequest]:
    found: dict[str, WorkloadRequest] = {}
    for _ in range(50 * number):
        if len(found) == number:
            break
        request = make(rng)
        found.setdefault(request.prompt, request)
    else:
        raise WorkloadError(f"the templates do not make {number} distinct prompts of a class")
    return list(found.values())


def _chat(rng: np.random.Generator) -> WorkloadRequest:
    form, detail = _pick(rng, list(_CHAT_DETAIL.items()))
    topic, wordiness = _pick(rng, list(_TOPICS.items()))
    question = _pick(rng, _CHAT_QUESTIONS)
    # "why would {person} need {topic}?", but "how do I explain {topic} to {person}?"
    person_first = question.startswith(("why", "what should"))
    slots = (_pick(rng, _PEOPLE), topic) if person_first else (topic, _pick(rng, _PEOPLE))
    prompt = form.format(question.format(*slots))
    cell = detail * wordiness / (_mean(_CHAT_DETAIL.values()) * _mean(_TOPICS.values()))
    return WorkloadRequest(_capital(prompt), _noisy(rng, CHAT_MEAN_TOKENS * cell), "chat")


def _summarization(rng: np.random.Generator) -> WorkloadRequest:
    form, detail = _pick(rng, list(_SUMMARY_FORMS.items()))
    topic = _pick(rng, list(_TOPICS))
    num_sentences = int(np.clip(rng.lognormal(np.log(16), 0.4), 5, 40))
    report = " ".join(_sentence(rng, topic) for _ in range(num_sentences))
    prompt = f"Summarize the following report on {topic} in {form}.\n\n{report}"
    cell = SUMMARY_MEAN_TOKENS * detail / _mean(_SUMMARY_FORMS.values())
    return WorkloadRequest(prompt, _noisy(rng, cell), "summarization")


def _writing(rng: np.random.Generator) -> WorkloadRequest:
    words = _pick(rng, _WRITING_WORDS)
    kind, topic, person = _pick(rng, _WRITING_KINDS), _pick(rng, list(_TOPICS)), _pick(rng, _PEOPLE)
    prompt = f"Write a {kind} about {topic} for {person}, of about {words} words."
    mean_tokens = min(words, MAX_WRITING_WORDS) * TOKENS_PER_WORD
    cut = int(MAX_WRITING_WORDS * TOKENS_PER_WORD)
    return WorkloadRequest(prompt, min(_noisy(rng, mean_tokens), cut), "writing")


def _sentence(rng: np.random.Generator, topic: str) -> str:
    year, number = int(rng.integers(1990, 2025)), int(rng.integers(2, 900))
    subject, verb, thing = (_pick(rng, words) for words in (_SUBJECTS, _VERBS, _OBJECTS))
    return f"{subject} {verb} {thing} around {topic} in {year}, on the basis of {number} cases."


def _noisy(rng: np.random.Generator, mean: float, noise: float = NOISE) -> int:
    """A log-normal length of this mean, at least 1."""
    return max(1, round(mean * float(rng.lognormal(-(noise**2) / 2, noise))))


def _pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]


def _mean(factors: Iterable[float]) -> float:
    return float(np.mean(list(factors)))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
