"""The plan language: answers whose first words say how long they will be.

A prompt, in English, is of one of four kinds. An answer opens with three words, which mostly say of
how many sections it will be; each section begins with its ordinal word, goes on with words of the
prompt's topic, and ends by chance. So a prompt says something of the length, a model that has read
its own opening knows more, and the best that anybody can know at any word can be computed (Reader).
It shows what hidden states are worth if they know more than the prompt does; whether those of a
real language model do is for its operator to find out (docs/probe.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

KINDS = ("note", "reply", "guide", "report")
NUM_SECTIONS = np.array([1, 2, 4, 8, 16, 24])
# Our choice: P(sections | kind), so that the kind explains a third of the variance of the length's
# logarithm, and the number of sections nine tenths.
SECTION_SHARES = np.array(
    [
        [0.50, 0.25, 0.12, 0.08, 0.03, 0.02],
        [0.25, 0.30, 0.20, 0.15, 0.06, 0.04],
        [0.10, 0.15, 0.25, 0.25, 0.15, 0.10],
        [0.03, 0.07, 0.15, 0.30, 0.25, 0.20],
    ]
)
NEUTRAL_SHARE = 0.25
NUM_OPENERS = 3
LEAST_TOPIC_WORDS = 8
END_CHANCE = 1 / 16
# No answer is longer; fewer than one in a million would be.
MAX_TOKENS = 1024

_PROMPTS = (
    ("write a short note on {} and {}", "jot down a line about {} with {}",
     "one quick note: {}, {}"),
    ("answer my friend who asked of {} and {}", "send a reply to this mail on {} and {}",
     "what would you say of {} or {} ?"),
    ("make a guide to {} for those who like {}", "show step by step how {} goes with {}",
     "teach new people all of {} and {}"),
    ("write a full report on {} and its part in {}", "give the whole long history of {} and {}",
     "study {} in great detail , and {} too"),
)  # fmt: skip
_ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
    "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth",
    "eighteenth", "nineteenth", "twentieth", "twentyfirst", "twentysecond", "twentythird",
    "twentyfourth",
)  # fmt: skip
_NUM_TOPICS = 8
_TOPIC_WORDS = 40
_SYNONYMS = 2


@dataclass(frozen=True, slots=True)
class Words:
    """The vocabulary, by what words are for: ids of tokens.

    openers: shape (plans + 1, openers, synonyms), the last row neutral. topics: shape (topics,
    words).
    """

    vocabulary: tuple[str, ...]
    ordinals: NDArray[np.int64]
    openers: NDArray[np.int64]
    topics: NDArray[np.int64]
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """kind: of KINDS, by position. topic: by position."""

    text: str
    kind: int
    topic: int


def words_of(special_tokens: Sequence[str], end_token: str, common_words: Sequence[str]) -> Words:
    """special_tokens: the first ids. common_words: English ones, for topics and openers."""
    fixed = {word for forms in _PROMPTS for form in forms for word in form.split()}
    fixed = {word.strip(":,?") for word in fixed if word != "{}"} | {",", ":", "?", ".", *_ORDINALS}
    plain = [w for w in common_words if w.isalpha() and len(w) > 3 and w not in fixed]
    num_topic_words = _NUM_TOPICS * _TOPIC_WORDS
    num_openers = (len(NUM_SECTIONS) + 1) * NUM_OPENERS * _SYNONYMS
    vocabulary = [*special_tokens, *sorted(fixed - {""}), *plain[: num_topic_words + num_openers]]
    place = {word: i for i, word in enumerate(vocabulary)}
    chosen = np.array([place[word] for word in plain[: num_topic_words + num_openers]])
    openers, topics = np.split(
        chosen[np.random.default_rng(0).permutation(chosen.size)], [num_openers]
    )
    return Words(
        tuple(vocabulary),
        np.array([place[word] for word in _ORDINALS]),
        openers.reshape(len(NUM_SECTIONS) + 1, NUM_OPENERS, _SYNONYMS),
        topics.reshape(_NUM_TOPICS, _TOPIC_WORDS),
        vocabulary.index(end_token),
    )


def ask(words: Words, rng: np.random.Generator) -> Prompt:
    """A prompt at random."""
    kind, topic = int(rng.integers(len(KINDS))), int(rng.integers(_NUM_TOPICS))
    named = [words.vocabulary[i] for i in rng.choice(words.topics[topic], 2, replace=False)]
    forms = _PROMPTS[kind]
    return Prompt(forms[rng.integers(len(forms))].format(*named), kind, topic)


def answer(prompt: Prompt, words: Words, rng: np.random.Generator) -> list[int]:
    """An answer to it, the end token included."""
    plan = int(rng.choice(len(NUM_SECTIONS), p=SECTION_SHARES[prompt.kind]))
    said = len(NUM_SECTIONS) if rng.random() < NEUTRAL_SHARE else plan
    tokens = [int(rng.choice(words.openers[said, i])) for i in range(NUM_OPENERS)]
    for section in range(NUM_SECTIONS[plan]):
        num_words = LEAST_TOPIC_WORDS + int(rng.geometric(END_CHANCE)) - 1
        tokens.append(int(words.ordinals[section]))
        tokens += rng.choice(words.topics[prompt.topic], num_words).tolist()
    return [*tokens, words.end][:MAX_TOKENS]


class Reader:
    """The exact distribution of what is left of an answer, from its kind and its tokens so far."""

    def __init__(self, words: Words, kind: int) -> None:
        self._ordinals = {int(word): i + 1 for i, word in enumerate(words.ordinals)}
        self._openers = {
            int(word): plan for plan, forms in enumerate(words.openers) for word in forms.flat
        }
        self.shares = SECTION_SHARES[kind].copy()
        self._num_openers, self._section, self._num_words = 0, 0, 0

    def read(self, token: int) -> None:
        """The answer goes on with this token, not the end."""
        if token in self._openers:
            self._num_openers += 1
            if (plan := self._openers[token]) < len(NUM_SECTIONS):
                self._believe(np.arange(len(NUM_SECTIONS)) == plan)
        elif token in self._ordinals:
            self._section, self._num_words = self._ordinals[token], 0
            self._believe(self._section <= NUM_SECTIONS)
        else:
            self._num_words += 1

    def _believe(self, possible: NDArray[np.bool_]) -> None:
        # A model that was sampled may say what the language does not allow.
        if (self.shares * possible).sum() > 0:
            self.shares = self.shares * possible / (self.shares * possible).sum()

    def remaining(self) -> NDArray[np.float64]:
        """P(so many tokens are left, the end token counted), shape (MAX_TOKENS + 1,)."""
        total = np.zeros(MAX_TOKENS + 1)
        for share, number in zip(self.shares, NUM_SECTIONS, strict=True):
            if share <= 0:
                continue
            to_come = int(number) - self._section if self._section else int(number)
            sure = max(0, NUM_OPENERS - self._num_openers) if not self._section else 0
            sure += to_come * (1 + LEAST_TOPIC_WORDS) + 1
            if self._section:
                sure += max(0, LEAST_TOPIC_WORDS - self._num_words)
            chance = _sum_of_geometrics(to_come + (self._section > 0))
            total[min(sure, MAX_TOKENS) :] += (
                share * chance[: MAX_TOKENS + 1 - min(sure, MAX_TOKENS)]
            )
        total[-1] += max(0.0, 1.0 - total.sum())
        return total


@cache
def _sum_of_geometrics(number: int) -> NDArray[np.float64]:
    """P(so many words beyond the least, in so many sections), shape (MAX_TOKENS + 1,)."""
    if number == 0:
        return np.concatenate([[1.0], np.zeros(MAX_TOKENS)])
    one = END_CHANCE * (1 - END_CHANCE) ** np.arange(MAX_TOKENS + 1)
    summed = np.convolve(_sum_of_geometrics(number - 1), one)
    return np.asarray(summed[: MAX_TOKENS + 1], np.float64)
