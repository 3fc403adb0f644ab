"""What is asked of the servers: prompts with the lengths of their answers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from predictor_store.data.warm import Observation

# The other prompts are for evaluation.
HISTORY_SHARE = 0.4
MAX_HISTORY_PER_CLASS = 500


class WorkloadError(ValueError):
    """The workload cannot be had; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A prompt and how many tokens its answer has, the end token counted.

    class_name: what kind of request it is, for sampling and reports; no server is told.
    output_ids: the answer, if it is to be said token by token (bench.workloads.forced_tokens);
        else its length alone is forced.
    """

    prompt: str
    output_tokens: int
    class_name: str
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by purpose, disjoint by prompt; description: how they came about."""

    history: tuple[WorkloadRequest, ...]
    evaluation: tuple[WorkloadRequest, ...]
    description: str

    @classmethod
    def split(cls, requests: Iterable[WorkloadRequest], description: str) -> Workload:
        """Each prompt goes by its own hash, so that its duplicates go the same way."""
        history: list[WorkloadRequest] = []
        evaluation: list[WorkloadRequest] = []
        for request in requests:
            purpose = history if _hash_share(request.prompt) < HISTORY_SHARE else evaluation
            purpose.append(request)
        return cls(tuple(history), tuple(evaluation), description)

    def observations(self) -> list[Observation]:
        """The history, for warm_store; its classes mixed, in an order that is always the same.

        At most MAX_HISTORY_PER_CLASS of each, so that no dataset crowds out the others.
        """
        mixed = sorted(self.history, key=lambda request: stable_hash("order of " + request.prompt))
        left = Counter({request.class_name: MAX_HISTORY_PER_CLASS for request in mixed})
        observations = []
        for request in mixed:
            if left[request.class_name] > 0:
                left[request.class_name] -= 1
                observations.append(Observation(request.prompt, request.output_tokens))
        return observations


def sample(
    requests: Sequence[WorkloadRequest], num_requests: int, seed: int, *, at_most: bool = False
) -> list[WorkloadRequest]:
    """num_requests of them, no prompt twice, every class as often, in random order.

    at_most: take fewer where a class has too few prompts; else WorkloadError is raised then.
    """
    rng = np.random.default_rng(seed)
    classes: dict[str, dict[str, WorkloadRequest]] = {}
    for request in requests:
        classes.setdefault(request.class_name, {})[request.prompt] = request
    smallest = min(len(prompts) for prompts in classes.values())
    if at_most:
        num_requests = min(num_requests, smallest * len(classes))
    chosen: list[WorkloadRequest] = []
    for i, (name, prompts) in enumerate(sorted(classes.items())):
        wanted = num_requests // len(classes) + (i < num_requests % len(classes))
        if wanted > len(prompts):
            raise WorkloadError(
                f"{num_requests} requests need {wanted} prompts of class {name}, which has "
                f"{len(prompts)}: at most {smallest * len(classes)} requests a run"
            )
        pool = list(prompts.values())
        chosen += [pool[j] for j in rng.choice(len(pool), wanted, replace=False)]
    return [chosen[j] for j in rng.permutation(len(chosen))]


def stable_hash(text: str) -> int:
    """64 bits that depend on the text alone (Python's own hash differs between processes)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _hash_share(prompt: str) -> float:
    """In [0, 1), equal for prompts that differ in case and white space alone."""
    return stable_hash(" ".join(prompt.casefold().split())) / 2**64
