"""Reads hidden states within the model's forward pass, and so within CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from patches.engine_types import Batch
from patches.probe.scores import Probing
from predictor_store.probe.file import ProbeFile

# The rows of the buffers: more tokens than any step samples. A larger step is not read.
_MAX_ROWS = 4096


class Tap:
    """The tap of one rank. It captures the probe's logits and the states to record.

    All ranks capture, because capturing completes sums across ranks. Rank 0 also observes
    (sglang/srt/sampling/sampling_observer.py) and passes its readings to its scheduler. The
    captures go to buffers of their own, which each replay of a CUDA graph overwrites.
    """

    def __init__(
        self,
        probe: ProbeFile | None,
        recorded_layers: Sequence[int],
        hidden_size: int,
        device: Any,
        probing: Callable[[], Probing | None],
    ) -> None:
        """probing: returns this process's Probing; None until it has a scheduler."""
        self.layers = sorted({*recorded_layers, *([] if probe is None else [probe.layer])})
        self._recorded = [self.layers.index(layer) for layer in recorded_layers]
        self._place = None if probe is None else self.layers.index(probe.layer)
        self._weights: list[torch.Tensor] = []
        self._probing = probing
        self.logits: torch.Tensor | None = None
        self.states: torch.Tensor | None = None
        if probe is not None:
            arrays = (probe.w1, probe.b1, probe.w2, probe.b2)
            self._weights = [torch.tensor(array, device=device) for array in arrays]
            self.logits = torch.zeros(_MAX_ROWS, len(probe.b2), device=device)
        if recorded_layers:
            shape = (_MAX_ROWS, len(recorded_layers), hidden_size)
            self.states = torch.zeros(shape, dtype=torch.float16, device=device)

    def capture(self, captured: Any, sample_rows: torch.Tensor | None) -> None:
        """Capture the logits and states of a forward pass.

        captured: the outputs of the layers, as a list or packed into one tensor. They have a row
            for each token for which the pass computes logits.
        sample_rows: the rows that a token is sampled from; None for all.
        """
        if isinstance(captured, torch.Tensor):
            captured = captured.chunk(len(self.layers), dim=-1)
        if sample_rows is not None:
            captured = [states[sample_rows] for states in captured]
        num_rows = captured[0].shape[0]
        if num_rows > _MAX_ROWS:
            return
        if self.logits is not None:
            w1, b1, w2, b2 = self._weights
            inner = linear(captured[self._place].to(w1.dtype), w1, b1).relu()
            self.logits[:num_rows].copy_(linear(inner, w2, b2))
        if self.states is not None:
            for place, layer in enumerate(self._recorded):
                self.states[:num_rows, place].copy_(captured[layer])

    def is_active(self, sampling_info: Any) -> bool:
        """Whether to observe. SGLang asks in every step."""
        return self._probing() is not None

    def before_grammar(self, logits: torch.Tensor, sampling_info: Any) -> bool:
        """Return a state for after_sample. Trap: if it is None, after_sample is not called."""
        return True

    def after_sample(self, state: bool, token_ids: torch.Tensor) -> Output | None:
        """Return a copy of the captures, because the next replay of a graph writes into the same
        buffers."""
        num_rows = token_ids.shape[0]
        if num_rows > _MAX_ROWS:
            return None
        read = [None if t is None else t[:num_rows].clone() for t in (self.logits, self.states)]
        return Output(read, self._probing)


class Output:
    """The readings of a step, on the device or the host (sglang.srt.managers.auxiliary_output)."""

    def __init__(
        self, tensors: Sequence[torch.Tensor | None], probing: Callable[[], Probing | None]
    ) -> None:
        self._tensors = tensors
        self._probing = probing

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        """Copy the readings to the host, together with the step's result."""
        copies = [None if t is None else copy_tensor(t) for t in self._tensors]
        return Output(copies, self._probing)

    def consume(self, batch: Batch, commits: Sequence[Any]) -> None:
        """Pass the readings to the scheduler, after the step's tokens are committed."""
        if (probing := self._probing()) is not None:
            logits, states = (None if t is None else t.numpy() for t in self._tensors)
            probing.read(batch, commits, logits, states)
