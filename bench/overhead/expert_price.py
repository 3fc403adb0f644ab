"""What a queue per expert costs: `python -m bench.overhead.expert_price`.

Operators launched for one prefill of bench.overhead.expert_queues, and the best time of some runs,
over those with the experts grouped. The times are this CPU's, and say nothing of a GPU.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.overhead.expert_queues import VOCABULARY, ExpertQueues, Model

_REPEATS = 5


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """Counts operators, each of which a GPU launches a kernel for, views left out."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def queued(model: Model, tokens: Tensor) -> None:
    """One sequence, with nobody else there."""
    queues = ExpertQueues(model)
    queues.arrive(tokens)
    while queues.step():
        pass


def main() -> None:
    """Prints the ratio of launches, and of the best seconds on this CPU, by tokens of a prefill."""
    model = Model()
    for num_tokens in (16, 256, 2048):
        tokens, prices = torch.arange(num_tokens) * 7 % VOCABULARY, []
        for run in (Model.forward, queued):
            seconds = []
            for _ in range(_REPEATS):
                began_s = time.perf_counter()
                run(model, tokens)
                seconds.append(time.perf_counter() - began_s)
            with Launches() as launches:
                run(model, tokens)
            prices.append((launches.num, min(seconds)))
        (before, before_s), (after, after_s) = prices
        print(f"{num_tokens} tokens: {before} launches grouped, {after} queued; seconds x "
              f"{after_s / before_s:.2f}")  # fmt: skip


if __name__ == "__main__":
    with torch.no_grad():
        main()
