"""The plan language, and what can be known of its answers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bench.prediction import plan_states
from bench.workloads.plan_language import KINDS, Reader, Words, answer, ask, words_of
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.probe.posterior import Posterior


@pytest.fixture(scope="module")
def words() -> Words:
    common = ["zz" + "".join(letters) for letters in product("abcdefgh", repeat=3)]
    return words_of(["[PAD]", "[END]"], "[END]", common)


def test_answers_are_as_long_as_was_computed(words: Words) -> None:
    rng = np.random.default_rng(0)
    prompts = [ask(words, rng) for _ in range(3000)]
    lengths = np.array([len(answer(prompt, words, rng)) for prompt in prompts])
    assert lengths.mean() == pytest.approx(171, rel=0.06)
    assert np.median(lengths) == pytest.approx(93, rel=0.1)
    assert np.percentile(lengths, 90) == pytest.approx(464, rel=0.1)
    kind = np.array([prompt.kind for prompt in prompts])
    logs = np.log(lengths)
    within = sum(logs[kind == k].var() * (kind == k).mean() for k in range(len(KINDS)))
    assert 1 - within / logs.var() == pytest.approx(0.29, abs=0.05)


@pytest.mark.parametrize("age", [0, 4, 40])
def test_the_exact_filter_is_right_as_often_as_it_says(words: Words, age: int) -> None:
    rng = np.random.default_rng(1)
    ranks = []
    for _ in range(600):
        prompt = ask(words, rng)
        tokens = answer(prompt, words, rng)
        if len(tokens) <= age:
            continue
        reader = Reader(words, prompt.kind)
        for token in tokens[:age]:
            reader.read(token)
        chance = reader.remaining()
        assert chance.sum() == pytest.approx(1.0)
        left = len(tokens) - age
        ranks.append(chance[:left].sum() + rng.random() * chance[left])
    # Uniform, if the distribution is the true one.
    assert np.histogram(ranks, 5, (0, 1))[0] / len(ranks) == pytest.approx(0.2, abs=0.06)


def test_a_posterior_by_the_exact_filters_scores_is_the_exact_filter(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_states, "plan_words", lambda: words)
    rng = np.random.default_rng(2)
    prompt = next(p for p in iter(lambda: ask(words, rng), None) if p.kind == 2)
    tokens = answer(prompt, words, rng)
    scores = plan_states.exact_scores({"kind": prompt.kind, "tokens": tokens})
    rule = Posterior(plan_states.exact_reading())
    job = Job(0, 1, 1536, LengthDistribution.from_samples([7] * 50, "history"), 0)
    reader = Reader(words, prompt.kind)
    for age in (0, 1, 2, 4, 8):
        rule.refine([job], [age], scores[age][None])
        chance = reader.remaining()
        assert job.refined is not None
        mean = float(chance @ np.arange(chance.size))
        assert job.refined.mean_left_tokens() == pytest.approx(mean, rel=0.05)
        for token in tokens[age : max(1, 2 * age)]:
            reader.read(token)
