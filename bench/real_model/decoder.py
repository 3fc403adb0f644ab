"""SmolLM2 in plain torch, many chats at a time: answers by the thousand on a CPU without a server.

The weights are those that the server loads and a test holds the logits against transformers' own
model, so an answer made here is an answer of that model. A server on a CPU computes attention
request by request; here one step serves every slot, and a slot that ends takes the next chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

# Whether to keep the hidden states at an age, in tokens, of the answer to chat number so and so.
Wanted = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Chat:
    """What is to be answered. seed: of the sampling; temperature 0: the likeliest token."""

    input_ids: tuple[int, ...]
    seed: int
    temperature: float = 0.7
    max_new_tokens: int = 1024


@dataclass(eq=False, slots=True)
class Answer:
    """One answer as it grows. number: of its chat in the order given.

    hidden: per recorded age, in tokens, what each layer put out there: float16 [layers, size].
    """

    number: int
    chat: Chat
    rng: np.random.Generator
    output_ids: list[int] = field(default_factory=list)
    hidden: list[tuple[int, np.ndarray]] = field(default_factory=list)
    ended: bool = False


class Decoder:
    """A Llama model with a KV cache of num_slots times max_tokens tokens."""

    def __init__(self, folder: Path, num_slots: int = 48, max_tokens: int = 2048) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
        self._embedding, self._last_norm = (
            weights[f"model.{name}.weight"] for name in ("embed_tokens", "norm")
        )
        self._num_layers: int = config["num_hidden_layers"]
        self._kv_heads: int = config["num_key_value_heads"]
        self._group = config["num_attention_heads"] // self._kv_heads
        self._head_dim: int = config["head_dim"]
        self._epsilon: float = config["rms_norm_eps"]
        self.end_id: int = config["eos_token_id"]
        self._layers = [_layer(weights, i) for i in range(self._num_layers)]
        pairs = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
        angles = torch.outer(
            torch.arange(max_tokens, dtype=torch.float32),
            config["rope_parameters"]["rope_theta"] ** -pairs,
        ).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()
        shape = (self._num_layers, 2, num_slots, self._kv_heads, max_tokens, self._head_dim)
        self._cache = torch.zeros(shape)
        self._num_slots, self._max_tokens = num_slots, max_tokens

    def answer(self, chats: Iterable[Chat], wanted: Wanted | None = None) -> Iterator[Answer]:
        """Each answer as it ends, with its end token unless the cap cut it.

        wanted: whether to keep the hidden states at this age of the chat of this number.
        """
        wanted = wanted or (lambda age, number: False)
        waiting = enumerate(chats)
        slots: list[Answer | None] = [None] * self._num_slots
        while True:
            for slot, held in enumerate(slots):
                if held is None and (found := next(waiting, None)) is not None:
                    slots[slot] = self._prefill(slot, *found, wanted)
            running = [(slot, held) for slot, held in enumerate(slots) if held is not None]
            if not running:
                return
            for slot, held in running:
                if held.ended:
                    yield held
                    slots[slot] = None
            running = [pair for pair in running if not pair[1].ended]
            if running:
                self._decode(running, wanted)

    def logits(self, input_ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary] of a text, through slot 0 (for the test)."""
        with torch.inference_mode():
            return self._forward(torch.tensor([input_ids]), [0], [0])[0] @ self._embedding.T

    def _prefill(self, slot: int, number: int, chat: Chat, wanted: Wanted) -> Answer:
        if len(chat.input_ids) + chat.max_new_tokens > self._max_tokens:
            raise ValueError(f"chat {number} has more than {self._max_tokens} tokens with its cap")
        held = Answer(number, chat, np.random.default_rng(chat.seed))
        self._step([(slot, held)], torch.tensor([chat.input_ids]), [0], wanted)
        return held

    def _decode(self, running: list[tuple[int, Answer]], wanted: Wanted) -> None:
        last = torch.tensor([[held.output_ids[-1]] for _, held in running])
        self._step(running, last, [_length(held) - 1 for _, held in running], wanted)

    def _step(
        self,
        running: list[tuple[int, Answer]],
        ids: torch.Tensor,
        starts: list[int],
        wanted: Wanted,
    ) -> None:
        """Every answer's next token."""
        answers = [held for _, held in running]
        kept = [i for i, x in enumerate(answers) if wanted(len(x.output_ids), x.number)]
        layers: list[torch.Tensor] | None = [] if kept else None
        with torch.inference_mode():
            hidden = self._forward(ids, [slot for slot, _ in running], starts, layers)
            for i in kept:
                states = torch.stack([x[i, -1] for x in layers or ()]).half().numpy()
                answers[i].hidden.append((len(answers[i].output_ids), states))
            self._sample(answers, hidden[:, -1])

    def _sample(self, answers: list[Answer], hidden: torch.Tensor) -> None:
        logits = hidden @ self._embedding.T
        heat = torch.tensor([[held.chat.temperature] for held in answers])
        total = torch.softmax(logits / heat.clamp(min=1e-6), -1).cumsum(-1)
        drawn = torch.tensor([[held.rng.random()] for held in answers], dtype=torch.float32)
        sampled = torch.searchsorted(total, drawn * total[:, -1:])[:, 0].clamp(
            max=total.shape[1] - 1
        )
        chosen = torch.where(heat[:, 0] > 0, sampled, logits.argmax(-1))
        for held, token in zip(answers, chosen.tolist(), strict=True):
            held.output_ids.append(token)
            full = len(held.output_ids) == held.chat.max_new_tokens
            held.ended = token == self.end_id or full

    def _forward(
        self,
        ids: torch.Tensor,
        slots: list[int],
        starts: list[int],
        layers: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states [rows, tokens, size] after the last norm; ids [rows, tokens] lie at
        starts[row] of their slot. layers: takes each layer's output."""
        rows, width = ids.shape
        at = torch.tensor(starts)[:, None] + torch.arange(width)
        cos, sin = self._cos[at][:, :, None], self._sin[at][:, :, None]
        where = torch.tensor(slots)[:, None].expand(rows, width)
        x = self._embedding[ids]
        for number, layer in enumerate(self._layers):
            y = self._norm(x, layer["input_norm"]) @ layer["qkv"]
            y = y.view(rows, width, -1, self._head_dim)
            heads = self._kv_heads * self._group
            q, k, v = y.split([heads, self._kv_heads, self._kv_heads], 2)
            keys, values = self._cache[number]
            keys[where, :, at] = _rotate(k, cos, sin)
            values[where, :, at] = v
            attended = self._attend(_rotate(q, cos, sin), keys, values, slots, starts)
            x = x + attended @ layer["o"]
            gate, up = (self._norm(x, layer["mlp_norm"]) @ layer["gate_up"]).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ layer["down"]
            if layers is not None:
                layers.append(x)
        return self._norm(x, self._last_norm)

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: list[int],
        starts: list[int],
    ) -> torch.Tensor:
        rows, width = q.shape[:2]
        # The query heads that share a key head are that head's queries: no key is copied.
        q = (
            q.view(rows, width, self._kv_heads, self._group, -1)
            .permute(0, 2, 3, 1, 4)
            .flatten(2, 3)
        )
        parts = []
        for i, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            k, v = (kind[slot : slot + 1, :, : start + width] for kind in (keys, values))
            mask = None
            if width > 1:
                mask = torch.ones(width, start + width, dtype=torch.bool).tril(start)
                mask = mask.repeat(self._group, 1)
            parts.append(
                functional.scaled_dot_product_attention(q[i : i + 1], k, v, attn_mask=mask)
            )
        found = torch.cat(parts).view(rows, self._kv_heads, self._group, width, -1)
        return found.permute(0, 3, 1, 2, 4).reshape(rows, width, -1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self._epsilon)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _length(held: Answer) -> int:
    return len(held.chat.input_ids) + len(held.output_ids)


def _layer(weights: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """The weights of one layer, fused and [in, out]."""

    def of(*names: str) -> torch.Tensor:
        found = [weights[f"model.layers.{number}.{name}.weight"] for name in names]
        return torch.cat(found).T.contiguous() if found[0].ndim == 2 else found[0]

    return {
        "qkv": of(*(f"self_attn.{name}_proj" for name in "qkv")),
        "o": of("self_attn.o_proj"),
        "gate_up": of("mlp.gate_proj", "mlp.up_proj"),
        "down": of("mlp.down_proj"),
        "input_norm": of("input_layernorm"),
        "mlp_norm": of("post_attention_layernorm"),
    }
