"""Training a probe on what a server has recorded (docs/probe.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from predictor_store.probe import weights
from predictor_store.probe.file import ProbeFile
from predictor_store.probe.recording import Recording
from predictor_store.probe.weights import Quality
from sage_sched.fields import UserError
from sage_sched.probe import Reading, from_steps, in_steps

BAND_AGES = np.array([0, 1, 2, 4, 16, 64, 256, 1024])
_INNER = 512
_NUM_LOG_BINS = 20
_TRAIL_BINS, _TRAIL_TOKENS = 10, 512
_MOST_TOKENS = 1 << 24
_BATCH_ROWS = 512
# Rows of one answer are much alike: more of them teach little.
_MOST_ROWS = 400_000
_PATIENCE = 3
_PRIOR_ROWS = 1.0


class TrainingError(UserError, ValueError):
    """The recording is not enough, or not usable; the message says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """name: "log", bins whose width doubles, which the posterior reads; or "trail", the paper's
    bins (Shahout et al. 2025, section 3.1: equal, 10 over 512 tokens), rate and epochs."""

    name: str
    rate: float
    num_epochs: int = 30

    def edges(self, longest_tokens: int) -> NDArray[np.int64]:
        """The bins' edges, in tokens, rising from 0."""
        if self.name == "trail":
            width = _TRAIL_TOKENS / _TRAIL_BINS
            return np.array([*np.rint(np.arange(_TRAIL_BINS) * width), _MOST_TOKENS], np.int64)
        steps = np.geomspace(1, max(longest_tokens, 64), _NUM_LOG_BINS)
        return np.array([0, *np.unique(np.rint(steps)).astype(np.int64)[:-1], _MOST_TOKENS])


RECIPES = {
    "log": Recipe("log", rate=1e-3),
    # The paper's batches are of 32 rows, which would take hours on a CPU.
    "trail": Recipe("trail", rate=1e-2),
}


@dataclass(frozen=True, slots=True)
class Trained:
    """A probe, and how good forecasts are on prompts that it has not seen: "prompt", by the prompt
    alone; "probe alone"; and "posterior", by both."""

    probe: ProbeFile
    qualities: dict[str, Quality]


def train(
    recording: Recording, recipe: Recipe, *, seed: int = 0, say: Callable[[str], None] = print
) -> Trained:
    """70 % of the prompts are trained on, 10 % choose layer, epoch, alpha, beta and gamma, and 20 %
    are reported on. Raises TrainingError."""
    share = recording.prompts[recording.answer] % np.uint64(10)
    fit, choose, report = share < 7, share == 7, share > 7
    for name, rows in (("train on", fit), ("choose by", choose), ("report on", report)):
        if np.unique(recording.answer[rows]).size < 20:
            raise TrainingError(f"there are fewer than 20 answers to {name}: record more")
    edges = recipe.edges(int(recording.lengths.max()))
    left = recording.lengths[recording.answer] - recording.ages
    is_cut = recording.is_cut[recording.answer]
    bins = np.searchsorted(edges, left, side="left") - 1
    fitted = []
    for place, layer in enumerate(recording.layers):
        states = recording.states[:, place].astype(np.float32)
        data = [(states[rows], bins[rows], is_cut[rows]) for rows in (fit, choose)]
        fitted.append((*_fit(data, len(edges) - 1, recipe, seed, say, f"layer {layer}"), place))
    _, arrays, place = min(fitted, key=lambda one: one[0])
    reading = Reading(edges, BAND_AGES, np.zeros((BAND_AGES.size, len(edges) - 1)))
    w1, b1, w2, b2 = arrays
    of, layer = recording.fingerprint, recording.layers[place]
    probe = ProbeFile(w1, b1, w2, b2, layer, of, recipe.name, reading)
    log_p = from_steps(in_steps(probe.log_p(recording.states[:, place].astype(np.float32))))
    base = base_rates(np.exp(log_p[fit]), recording.ages[fit], BAND_AGES)
    reading = replace(reading, log_base=base)
    say("fitting alpha, beta and gamma")
    chosen = weights.weighed(recording, log_p, reading, choose & ~is_cut)
    told = report & ~is_cut
    found = {
        "prompt": weights.forecasts(recording, log_p, weights.without_scores(chosen), told),
        "probe alone": weights.alone(recording, log_p, edges, told),
        "posterior": weights.forecasts(recording, log_p, chosen, told),
    }
    qualities = {name: weights.quality_by_age(of) for name, of in found.items()}
    return Trained(replace(probe, reading=chosen), qualities)


def _fit(
    data: Sequence[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]],
    num_bins: int,
    recipe: Recipe,
    seed: int,
    say: Callable[[str], None],
    name: str,
) -> tuple[float, list[NDArray[np.float32]]]:
    """The best epoch's loss on the second of data, and its network."""
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
    optimizer = torch.optim.AdamW(network.parameters(), recipe.rate)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.num_epochs)
    best, kept, worse = float("inf"), [p.detach().clone() for p in network.parameters()], 0
    for epoch in range(recipe.num_epochs):
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
        say(f"{name}, epoch {epoch + 1} of {recipe.num_epochs}: held-out loss {held_out:.4f} nats")
        if worse >= _PATIENCE:
            break
    w1, b1, w2, b2 = kept
    arrays = [w1 / scale, b1 - (w1 / scale) @ mean, w2, b2]
    return best, [array.numpy().astype(np.float32) for array in arrays]


def _loss(logits: torch.Tensor, bins: torch.Tensor, is_cut: torch.Tensor) -> torch.Tensor:
    """-ln P of the true bin; for an answer that was cut off, of that bin and all above."""
    losses = cross_entropy(logits, bins, reduction="none")
    if is_cut.any():
        log_p = logits[is_cut].log_softmax(dim=-1)
        above = torch.arange(logits.shape[1])[None] >= bins[is_cut][:, None]
        losses[is_cut] = -log_p.masked_fill(~above, -torch.inf).logsumexp(dim=-1)
    return losses.mean()


def base_rates(
    p: NDArray[np.float64], ages: NDArray[np.int64], band_ages: NDArray[np.int64]
) -> NDArray[np.float64]:
    """ln of the mean score, shape (bands, bins), of rows with scores p, shape (rows, bins). A band
    without rows has the rates of the one before.

    These are the scores and not the true bins, which are unknown for answers that were cut off: a
    probe learns from those too, and compared with the others alone it would find all answers long.
    """
    bands = np.searchsorted(band_ages, ages, side="right") - 1
    sums = np.zeros((band_ages.size, p.shape[1]))
    np.add.at(sums, bands, p)
    for band in range(1, band_ages.size):
        if not sums[band].any():
            sums[band] = sums[band - 1]
    sums += _PRIOR_ROWS / p.shape[1]
    base: NDArray[np.float64] = np.log(sums / sums.sum(axis=1, keepdims=True))
    return base
