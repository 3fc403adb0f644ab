"""A queue per expert (QLLM, section 3.3).

A Mixtral-shaped model in plain PyTorch and single precision. After attention and router a sequence
goes into the queues of its experts, and on when all have had it; between any two experts another
may come and pass. Against it the same model with its experts in one grouped product, as SGLang's
kernels have them. For the bench alone: no server offers it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, HEADS, VOCABULARY = 8, 8, 2, 128, 256, 4, 1024


class Model:
    """Random weights at 1 / sqrt(fan-in)."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        self.embeddings = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.head, self.qkv = drawn(VOCABULARY, HIDDEN), drawn(LAYERS, 3 * HIDDEN, HIDDEN)
        self.out, self.gate = drawn(LAYERS, HIDDEN, HIDDEN), drawn(LAYERS, EXPERTS, HIDDEN)
        self.up = drawn(LAYERS, EXPERTS, 2 * INNER, HIDDEN)
        self.down = drawn(LAYERS, EXPERTS, HIDDEN, INNER)

    def attend(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of one sequence, x of shape (tokens, HIDDEN): x behind attention, what experts are given,
        and by token (TOP_K each) what they weigh and which they are."""
        qkv = rms_norm(x, (HIDDEN,)) @ self.qkv[layer].T
        q, k, v = (part.view(len(x), HEADS, -1).transpose(0, 1) for part in qkv.chunk(3, -1))
        mixed = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + mixed.transpose(0, 1).reshape(len(x), HIDDEN) @ self.out[layer].T
        given = rms_norm(x, (HIDDEN,))
        weights, chosen = torch.topk(torch.softmax(given @ self.gate[layer].T, -1), TOP_K)
        return x, given, weights / weights.sum(-1, keepdim=True), chosen

    def expert(self, layer: int, expert: int | slice, given: Tensor) -> Tensor:
        """One of them, on (tokens, HIDDEN); or all at once, on (EXPERTS, tokens, HIDDEN)."""
        gate, up = (given @ self.up[layer, expert].mT).chunk(2, -1)
        return (silu(gate) * up) @ self.down[layer, expert].mT

    def grouped(self, layer: int, given: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """All experts in one product over padded groups."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        expert = chosen.flatten()[order]
        place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[expert]
        padded = given.new_zeros(EXPERTS, int(counts.max()), HIDDEN)
        padded[expert, place] = given[order // TOP_K]
        found = self.expert(layer, slice(None), padded)[expert, place]
        found = found * weights.flatten()[order, None]
        return torch.zeros_like(given).index_add_(0, order // TOP_K, found)

    def logits(self, x: Tensor) -> Tensor:
        """Of the last token."""
        return rms_norm(x[-1], (HIDDEN,)) @ self.head.T

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the last token, experts grouped."""
        x = self.embeddings[tokens]
        for layer in range(LAYERS):
            x, *routed = self.attend(layer, x)
            x = x + self.grouped(layer, *routed)
        return self.logits(x)


@dataclass(eq=False)
class Sequence:
    """Its state between two stops. num_left: (token, expert) pairs that are still in queues."""

    x: Tensor
    is_urgent: bool = False
    layer: int = 0
    num_left: int = 0
    logits: Tensor | None = None


class ExpertQueues:
    """Each step is an attention of one sequence, or an expert on all that is in its queue."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._ready: deque[Sequence] = deque()
        self._queues: dict[tuple[int, int], list[tuple[Sequence, Tensor, Tensor, Tensor]]] = {}

    def arrive(self, tokens: Tensor, is_urgent: bool = False) -> Sequence:
        """One comes, between any two steps."""
        self._ready.append(Sequence(self._model.embeddings[tokens], is_urgent))
        return self._ready[-1]

    def step(self) -> bool:
        """Whether there was anything to do. What has an urgent one goes first, then the first."""
        urgent = [one for one in self._ready if one.is_urgent]
        theirs = [
            key for key in self._queues if any(one.is_urgent for one, *_ in self._queues[key])
        ]
        if urgent or (self._ready and not theirs):
            self._attend((urgent or self._ready)[0])
        elif self._queues:
            self._run(*next(iter(theirs or self._queues)))
        else:
            return False
        return True

    def _attend(self, sequence: Sequence) -> None:
        self._ready.remove(sequence)
        sequence.x, given, weights, chosen = self._model.attend(sequence.layer, sequence.x)
        sequence.num_left = chosen.numel()
        for expert in chosen.unique().tolist():
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            queue = self._queues.setdefault((sequence.layer, expert), [])
            queue.append((sequence, rows, given[rows], weights[rows, slots]))

    def _run(self, layer: int, expert: int) -> None:
        queue = self._queues.pop((layer, expert))
        given = torch.cat([entry[2] for entry in queue])
        found = self._model.expert(layer, expert, given).split([len(entry[1]) for entry in queue])
        for (one, rows, _, weights), part in zip(queue, found, strict=True):
            one.x = one.x.index_add(0, rows, part * weights[:, None])
            one.num_left -= len(rows)
            one.layer += one.num_left == 0
            if one.num_left == 0 and one.layer < LAYERS:
                self._ready.append(one)
            elif one.num_left == 0:
                one.logits = self._model.logits(one.x)
