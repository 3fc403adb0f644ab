"""What reading hidden states costs a step of the model: `python -m bench.overhead.tap`.

Of a decode step of 32 requests, at several widths of the model: one layer's output kept (capture);
the probe's network on top (MLP); and all, to the scores that rank 0 tells and every rank applies.
Beside it what the weights of as many layers take that such a model has, by the same kernels and
without attention, so that shares are too high rather than too low. On one thread of a CPU, in
thread time, as others may use the core: on a GPU the network is four small kernels in the graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, silu

from patches.probe.scores import Probing
from patches.probe.tap import Observer, Tap
from predictor_store.probe.probe_file import ProbeFile
from sage_sched.config import StepTimeConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.policies.sage import Sage, SageParameters
from sage_sched.probe.posterior import Reading, is_due
from sage_sched.steps.time import ServerFacts

# By hidden size, how many layers such a model has.
_LAYERS = {128: 4, 256: 8, 1024: 16, 4096: 32}
_NUM_REQUESTS, _INNER, _CAP_TOKENS = 32, 512, 4096
_EDGES = np.array([0, *np.unique(np.geomspace(1, _CAP_TOKENS, 20).astype(int))[:-1], 1 << 24])


def weights_of_layer(hidden_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A Llama's, with a quarter as many heads of keys and values: x to x, shape (rows, hidden)."""
    sizes = (hidden_size, hidden_size // 4, hidden_size // 4, hidden_size)
    qkvo = [torch.randn(size, hidden_size) * 0.02 for size in sizes]
    gate, up = (torch.randn(hidden_size * 11 // 4, hidden_size) * 0.02 for _ in range(2))
    down = torch.randn(hidden_size, hidden_size * 11 // 4) * 0.02

    def layer(x: torch.Tensor) -> torch.Tensor:
        query, _, _ = (linear(x, matrix) for matrix in qkvo[:3])
        x = x + linear(query, qkvo[3])
        return x + linear(silu(linear(x, gate)) * linear(x, up), down)

    return layer


def seconds(step: Callable[[], object], repeats: int) -> float:
    """The median of its thread time."""
    spent = []
    for _ in range(repeats):
        began_s = time.thread_time()
        step()
        spent.append(time.thread_time() - began_s)
    return float(np.median(spent))


class Server:
    """What stands for one: a tap, who takes its scores, and requests that decode."""

    def __init__(self, hidden_size: int) -> None:
        rng, bins = np.random.default_rng(0), _EDGES.size - 1
        probe = ProbeFile(
            w1=(rng.normal(size=(_INNER, hidden_size)) / hidden_size**0.5).astype(np.float32),
            b1=np.zeros(_INNER, np.float32),
            w2=(rng.normal(size=(bins, _INNER)) / _INNER**0.5).astype(np.float32),
            b2=np.zeros(bins, np.float32),
            layer=0,
            fingerprint="",
            recipe="log",
            reading=Reading(_EDGES, np.array([0]), np.full((1, bins), -np.log(bins))),
            confusion=np.eye(bins),
        )
        facts = ServerFacts(72_000, 256, StepTimeConfig().step_time(), 1e-5)
        policy = Sage(SageParameters(posterior=True), facts)
        self.tap = Tap(probe, [], hidden_size, "cpu")
        self.probing = Probing(policy, probe, None)
        self._observer = Observer(self.tap, lambda: self.probing)
        self._reqs = []
        assert self.probing.refining is not None
        for arrival in range(_NUM_REQUESTS):
            known = LengthDistribution.from_samples(rng.integers(1, 2000, 64), "history")
            job = Job(arrival, 500, _CAP_TOKENS, known, 0)
            policy.on_arrival(job)
            self.probing.refining.arrived(job)
            self._reqs.append(SimpleNamespace(sage=SimpleNamespace(job=job)))
        # Each is at another place between two ages at which scores are due.
        self._ages = rng.integers(40, 1000, _NUM_REQUESTS)

    def step(self, captured: torch.Tensor) -> None:
        """All that a step has beyond the model."""
        self._ages += 1
        self.tap.capture([captured], None)
        on_device: Any = self._observer.after_sample(True, torch.zeros(_NUM_REQUESTS))
        commits = [SimpleNamespace(output_index=int(age)) for age in self._ages]
        batch: Any = SimpleNamespace(reqs=self._reqs)
        on_device.copy_to_host(lambda tensor: tensor.cpu()).consume(batch, commits)
        if (news := self.probing.news()) is not None:
            self.probing.told(news)


def main() -> None:
    """A row for each width: milliseconds, and the share of the model's weights that all take."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", choices=_LAYERS, default=[*_LAYERS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    assert is_due(32)
    print("| d, layers | weights, ms | capture, ms | MLP, ms | all, ms | MLP / weights | all |")
    print("|---" * 7 + "|")
    for width in args.widths:
        layer, server = weights_of_layer(width), Server(width)
        x, residual = torch.randn(2, _NUM_REQUESTS, width).unbind()
        repeats = 400 if width <= 256 else 100 if width <= 1024 else 30
        with torch.no_grad():
            model_s = _LAYERS[width] * seconds(lambda f=layer, x=x: f(x), max(5, repeats // 4))  # type: ignore[misc]
            capture_s = seconds(lambda x=x, r=residual: x + r, repeats)  # type: ignore[misc]
            mlp_s = seconds(lambda s=server, x=x: s.tap.capture([x], None), repeats)  # type: ignore[misc]
            all_s = capture_s + seconds(lambda s=server, x=x: s.step(x), repeats)  # type: ignore[misc]
        mlp_s += capture_s
        cells = [f"{1e3 * one:.3f}" for one in (model_s, capture_s, mlp_s, all_s)]
        shares = [f"{one / model_s:.2%}" for one in (mlp_s, all_s)]
        print(f"| {width}, {_LAYERS[width]} | {' | '.join(cells + shares)} |", flush=True)


if __name__ == "__main__":
    main()
