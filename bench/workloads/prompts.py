"""Defines workloads: prompts with the lengths of their answers."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from predictor_store.data.warm import Observation
from sage_sched.errors import UserError

# The share of prompts in the history. The others are for evaluation.
HISTORY_SHARE = 0.4
MAX_HISTORY_PER_CLASS = 500
# The share of repeated prompts that are reworded, and the rewordings.
_REWORDED = 1 / 3
_FORMS = ("Please: {}", "Hi! {}", "{} Thanks.", "Question: {}")


class WorkloadError(UserError, ValueError):
    """The workload is unavailable. The message names the missing part."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A prompt and the number of tokens of its answer, including the end token.

    class_name: its kind, for sampling and reports; servers do not see it.
    """

    prompt: str
    output_tokens: int
    class_name: str


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for the history and for evaluation.

    description: their origin.
    zipf: the exponent of popularity: the k-th most popular prompt is repeated in proportion to k **
        -zipf. If it is 0, all prompts differ.
    num_samples: how many requests with the same prompt arrive one after another.
    """

    history: tuple[WorkloadRequest, ...]
    evaluation: tuple[WorkloadRequest, ...]
    description: str
    zipf: float = 0.0
    num_samples: int = 1

    @classmethod
    def split(cls, requests: Iterable[WorkloadRequest], description: str) -> Workload:
        """Split requests by the hash of their prompts, so duplicates stay together."""
        history: list[WorkloadRequest] = []
        evaluation: list[WorkloadRequest] = []
        for request in requests:
            # Equal for prompts that differ only in case and white space.
            share = stable_hash(" ".join(request.prompt.casefold().split())) / 2**64
            (history if share < HISTORY_SHARE else evaluation).append(request)
        return cls(tuple(history), tuple(evaluation), description)

    def drawn(
        self,
        number: int,
        seed: int,
        is_wanted: Callable[[WorkloadRequest], bool] = lambda _: True,
        *,
        from_history: bool = False,
        again: bool = True,
    ) -> list[WorkloadRequest]:
        """Return requests, with equal numbers of each class, in random order.

        again: if there are too few, whether requests are repeated, in another order each time, or
            fewer are returned. Prompts under Zipf's law are always repeated.
        """
        pool = [r for r in (self.history if from_history else self.evaluation) if is_wanted(r)]
        if self.zipf:
            return _popular(pool, number, seed, self.zipf)
        if self.num_samples > 1:
            return _sampled(pool, -(-number // self.num_samples), seed)[:number]
        chosen = sample(pool, number, seed)
        rng, drawn = np.random.default_rng([seed, 3]), list(chosen)
        while again and len(drawn) < number:
            drawn += [chosen[i] for i in rng.permutation(len(chosen))]
        return drawn[:number]

    def observations(self) -> list[Observation]:
        """Return the history, for warm_store: classes mixed, always in the same order.

        It has at most MAX_HISTORY_PER_CLASS of each class, so that no dataset crowds out the
        others. Repeated prompts are not limited.
        """
        mixed = sorted(self.history, key=lambda request: stable_hash("order of " + request.prompt))
        most = len(mixed) if self.zipf else MAX_HISTORY_PER_CLASS
        left = Counter({request.class_name: most for request in mixed})
        observations = []
        for request in mixed:
            if left[request.class_name] > 0:
                left[request.class_name] -= 1
                observations.append(Observation(request.prompt, request.output_tokens))
        return observations


def sample(
    requests: Sequence[WorkloadRequest], num_requests: int, seed: int
) -> list[WorkloadRequest]:
    """Return num_requests requests, no prompt twice, with equal numbers of each class, in random
    order; fewer if a class has too few prompts."""
    rng = np.random.default_rng(seed)
    classes: dict[str, dict[str, WorkloadRequest]] = {}
    for request in requests:
        classes.setdefault(request.class_name, {})[request.prompt] = request
    smallest = min(len(prompts) for prompts in classes.values())
    num_requests = min(num_requests, smallest * len(classes))
    chosen: list[WorkloadRequest] = []
    for i, (_, prompts) in enumerate(sorted(classes.items())):
        wanted = num_requests // len(classes) + (i < num_requests % len(classes))
        pool = list(prompts.values())
        chosen += [pool[j] for j in rng.choice(len(pool), wanted, replace=False)]
    return [chosen[j] for j in rng.permutation(len(chosen))]


def _sampled(pool: Sequence[WorkloadRequest], num_prompts: int, seed: int) -> list[WorkloadRequest]:
    """Return all answers of this many prompts, prompt by prompt. Prompts are repeated if they are
    few."""
    answers = defaultdict[str, list[WorkloadRequest]](list)
    for request in pool:
        answers[request.prompt].append(request)
    order = np.random.default_rng(seed).permutation(len(answers))
    given = [*answers.values()]
    return [r for i in range(num_prompts) for r in given[order[i % len(order)]]]


def _popular(
    pool: Sequence[WorkloadRequest], number: int, seed: int, zipf: float
) -> list[WorkloadRequest]:
    """Return prompts by Zipf's law, a third of them reworded, each time with one of its answers."""
    rng = np.random.default_rng([seed, 4])
    answers = defaultdict[str, list[WorkloadRequest]](list)
    for request in pool:
        answers[request.prompt].append(request)
    prompts = sorted(answers, key=lambda prompt: stable_hash("rank of " + prompt))
    weights = np.arange(1, len(prompts) + 1) ** -zipf
    drawn = []
    for i in rng.choice(len(prompts), number, p=weights / weights.sum()):
        given = answers[prompts[i]]
        request = given[int(rng.integers(len(given)))]
        form = _FORMS[int(rng.integers(len(_FORMS)))] if rng.random() < _REWORDED else "{}"
        drawn.append(replace(request, prompt=form.format(request.prompt)))
    return drawn


def stable_hash(text: str) -> int:
    """Return 64 bits that depend on the text alone (Python's own hash differs between
    processes)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
