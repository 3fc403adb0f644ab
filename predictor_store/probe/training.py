"""Trains a probe on a server's recording (docs/predictor.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from predictor_store.probe.file import ProbeFile
from predictor_store.probe.quality import Quality, by_probe, by_prompt, quality_by_age
from predictor_store.probe.recording import Recording
from sage_sched.errors import UserError
from sage_sched.probe import from_steps, in_steps

_INNER = 512
# The bins and the learning rate of the paper (Shahout et al. 2025, section 3.1). Its batches have
# 32 rows, which would take hours on a CPU.
_TRAIL_BINS, _TRAIL_TOKENS = 10, 512
_RATE = 1e-2
_MOST_TOKENS = 1 << 24
_BATCH_ROWS = 512
# The maximum number of rows. Rows of one answer are much alike, so more of them would add little.
_MOST_ROWS = 400_000
_PATIENCE = 3


class TrainingError(UserError, ValueError):
    """The recording is too small or not usable. The message says why."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A probe, and the quality of predictions on prompts that it has not seen. The predictions
    "prompt" use the prompt and the age, "probe" only the hidden states."""

    probe: ProbeFile
    qualities: dict[str, Quality]


def train(
    recording: Recording,
    *,
    num_epochs: int = 30,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Trained:
    """Train a probe. 70 % of the prompts are trained on, 10 % choose layer and epoch, and 20 % are
    reported on. Raises TrainingError."""
    share = recording.prompts[recording.answer] % np.uint64(10)
    fit, choose, report = share < 7, share == 7, share > 7
    for name, rows in (("train on", fit), ("choose by", choose), ("report on", report)):
        if np.unique(recording.answer[rows]).size < 20:
            raise TrainingError(f"there are fewer than 20 answers to {name}: record more")
    width = _TRAIL_TOKENS / _TRAIL_BINS
    edges = np.array([*np.rint(np.arange(_TRAIL_BINS) * width), _MOST_TOKENS], np.int64)
    left = recording.lengths[recording.answer] - recording.ages
    is_cut = recording.is_cut[recording.answer]
    bins = np.searchsorted(edges, left, side="left") - 1
    fitted = []
    for place, layer in enumerate(recording.layers):
        states = recording.states[:, place].astype(np.float32)
        data = [(states[rows], bins[rows], is_cut[rows]) for rows in (fit, choose)]
        fitted.append((*_fit(data, len(edges) - 1, num_epochs, seed, say, f"layer {layer}"), place))
    _, arrays, place = min(fitted, key=lambda one: one[0])
    of, layer = recording.fingerprint, recording.layers[place]
    w1, b1, w2, b2 = arrays
    probe = ProbeFile(w1, b1, w2, b2, layer=layer, fingerprint=of, edges=edges)
    log_p = from_steps(in_steps(probe.log_p(recording.states[:, place].astype(np.float32))))
    told = report & ~is_cut
    found = {
        "prompt": by_prompt(recording, told),
        "probe": by_probe(recording, log_p, edges, told),
    }
    return Trained(probe, {name: quality_by_age(of) for name, of in found.items()})


def _fit(
    data: Sequence[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]],
    num_bins: int,
    num_epochs: int,
    seed: int,
    say: Callable[[str], None],
    name: str,
) -> tuple[float, list[NDArray[np.float32]]]:
    """Return the network of the best epoch, after its loss. The loss is measured on the second item
    of data."""
    torch.manual_seed(seed)
    (states, bins, is_cut), chosen_by = [
        (torch.as_tensor(a), torch.as_tensor(b), torch.as_tensor(c)) for a, b, c in data
    ]
    if len(states) > _MOST_ROWS:
        some = torch.randperm(len(states))[:_MOST_ROWS]
        states, bins, is_cut = states[some], bins[some], is_cut[some]
    # States differ in scale between dimensions; the scaling becomes part of the first layer.
    mean, scale = states.mean(dim=0), states.std(dim=0) + 1e-3
    network = torch.nn.Sequential(
        torch.nn.Linear(states.shape[1], _INNER), torch.nn.ReLU(), torch.nn.Linear(_INNER, num_bins)
    )
    optimizer = torch.optim.AdamW(network.parameters(), _RATE)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)
    best, kept, worse = float("inf"), [p.detach().clone() for p in network.parameters()], 0
    for epoch in range(num_epochs):
        for rows in torch.randperm(len(states)).split(_BATCH_ROWS):
            loss = _loss(network((states[rows] - mean) / scale), bins[rows], is_cut[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rate.step()
        with torch.no_grad():
            logits = network((chosen_by[0] - mean) / scale)
            held_out = float(_loss(logits, chosen_by[1], chosen_by[2]))
        worse += 1
        if held_out < best:
            best, worse = held_out, 0
            kept = [p.detach().clone() for p in network.parameters()]
        say(f"{name}, epoch {epoch + 1} of {num_epochs}: held-out loss {held_out:.4f} nats")
        if worse >= _PATIENCE:
            break
    w1, b1, w2, b2 = kept
    arrays = [w1 / scale, b1 - (w1 / scale) @ mean, w2, b2]
    return best, [array.numpy().astype(np.float32) for array in arrays]


def _loss(logits: torch.Tensor, bins: torch.Tensor, is_cut: torch.Tensor) -> torch.Tensor:
    """Return -ln P of the true bin; for a cut answer, -ln P of that bin and all above."""
    losses = cross_entropy(logits, bins, reduction="none")
    if is_cut.any():
        log_p = logits[is_cut].log_softmax(dim=-1)
        above = torch.arange(logits.shape[1])[None] >= bins[is_cut][:, None]
        losses[is_cut] = -log_p.masked_fill(~above, -torch.inf).logsumexp(dim=-1)
    return losses.mean()
