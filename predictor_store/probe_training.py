"""Training a probe on what a server has recorded (docs/probe.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from predictor_store.probe_file import ProbeFile
from predictor_store.probe_score import Forecast, Quality, quality_by_age
from predictor_store.recording import Recording
from sage_sched.job import Job
from sage_sched.posterior import Posterior, Reading
from sage_sched.refining import from_steps, in_steps

BAND_AGES = np.array([0, 1, 4, 16, 64, 256, 1024])
_INNER = 512
_NUM_LOG_BINS = 20
_TRAIL_BINS, _TRAIL_TOKENS = 10, 512
_MOST_TOKENS = 1 << 24
_BATCH_ROWS = 512
# Rows of one answer tell the same story: more of them teach little.
_MOST_ROWS = 400_000
_PATIENCE = 3
_GRID = {
    "alpha": (0.4, 0.6, 0.8, 1.0),
    "beta": (0.0, 0.15, 0.3, 0.5, 0.7, 1.0),
    "gamma": (0.5, 0.7, 0.85, 0.95, 1.0),
}
_PRIOR_ROWS = 1.0


class TrainingError(ValueError):
    """The recording does not do; the message says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """name: "log", bins whose width doubles, by which the posterior goes; or "trail", the paper's
    bins (Shahout et al. 2025, section 3.1: equal, 10 over 512 tokens), rate and epochs."""

    name: str
    rate: float
    num_epochs: int
    batch_rows: int

    def edges(self, longest_tokens: int) -> NDArray[np.int64]:
        """Of the bins."""
        if self.name == "trail":
            width = _TRAIL_TOKENS / _TRAIL_BINS
            return np.array([*np.rint(np.arange(_TRAIL_BINS) * width), _MOST_TOKENS], np.int64)
        steps = np.geomspace(1, max(longest_tokens, 64), _NUM_LOG_BINS)
        return np.array([0, *np.unique(np.rint(steps)).astype(np.int64)[:-1], _MOST_TOKENS])


RECIPES = {
    "log": Recipe("log", rate=1e-3, num_epochs=30, batch_rows=_BATCH_ROWS),
    # The paper's batches are of 32 rows: with as many rows as the paper has, hours on a CPU.
    "trail": Recipe("trail", rate=1e-2, num_epochs=30, batch_rows=_BATCH_ROWS),
}


@dataclass(frozen=True, slots=True)
class Trained:
    """A probe, and how well it does on prompts that it has not seen: the posterior, the probe
    alone, and the prompt's forecast."""

    probe: ProbeFile
    posterior: Quality
    probe_alone: Quality
    prompt: Quality


def train(
    recording: Recording,
    recipe: Recipe,
    *,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Trained:
    """Prompts go 70 to 10 to 20: to train on, to choose layer, epoch, alpha, beta and gamma by, and
    to report on. Raises TrainingError."""
    share = recording.prompts[recording.answer] % np.uint64(10)
    fit, choose, report = share < 7, share == 7, share > 7
    for name, rows in (("train on", fit), ("choose by", choose), ("report on", report)):
        if np.unique(recording.answer[rows]).size < 20:
            raise TrainingError(f"there are fewer than 20 answers to {name}: record more")
    longest = int(recording.lengths.max())
    edges = recipe.edges(longest)
    left = recording.lengths[recording.answer] - recording.ages
    is_cut = recording.is_cut[recording.answer]
    bins = np.searchsorted(edges, left, side="left") - 1
    best: tuple[float, int, list[NDArray[np.float32]]] | None = None
    for place, layer in enumerate(recording.layers):
        states = recording.states[:, place].astype(np.float32)
        data = [(states[rows], bins[rows], is_cut[rows]) for rows in (fit, choose)]
        loss, arrays = _fit(data, len(edges) - 1, recipe, seed, say, f"layer {layer}")
        if best is None or loss < best[0]:
            best = (loss, place, arrays)
    assert best is not None
    _, place, arrays = best
    base = _base(bins[fit & ~is_cut], recording.ages[fit & ~is_cut], len(edges) - 1)
    reading = Reading(edges, BAND_AGES, base)
    w1, b1, w2, b2 = arrays
    probe = ProbeFile(
        w1,
        b1,
        w2,
        b2,
        layer=recording.layers[place],
        fingerprint=recording.fingerprint,
        recipe=recipe.name,
        reading=reading,
        confusion=np.zeros((len(edges) - 1,) * 2),
    )
    log_p = from_steps(in_steps(probe.log_p(recording.states[:, place].astype(np.float32))))
    say("fitting alpha, beta and gamma")
    chosen = _weighed(recording, log_p, reading, choose & ~is_cut)
    told = report & ~is_cut
    read = log_p.argmax(axis=1)
    confusion = np.zeros((len(edges) - 1,) * 2)
    np.add.at(confusion, (bins[told], read[told]), 1)
    probe = replace(probe, reading=chosen, confusion=confusion)
    return Trained(
        probe,
        quality_by_age(forecasts(recording, log_p, Posterior(chosen), told)),
        quality_by_age(alone(recording, log_p, edges, told)),
        quality_by_age(forecasts(recording, log_p, Posterior(_without(chosen)), told)),
    )


def _without(reading: Reading) -> Reading:
    return Reading(reading.edges, reading.band_ages, reading.log_base, 1.0, 0.0, 1.0)


def _fit(
    data: Sequence[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]],
    num_bins: int,
    recipe: Recipe,
    seed: int,
    say: Callable[[str], None],
    name: str,
) -> tuple[float, list[NDArray[np.float32]]]:
    """The best epoch's loss on what is chosen by, and its network."""
    torch.manual_seed(seed)
    (states, bins, is_cut), chosen_by = [
        (torch.as_tensor(a), torch.as_tensor(b), torch.as_tensor(c)) for a, b, c in data
    ]
    if len(states) > _MOST_ROWS:
        some = torch.randperm(len(states))[:_MOST_ROWS]
        states, bins, is_cut = states[some], bins[some], is_cut[some]
    # States differ in scale between dimensions; what evens it out becomes part of the first layer.
    mean, scale = states.mean(dim=0), states.std(dim=0) + 1e-3
    network = torch.nn.Sequential(
        torch.nn.Linear(states.shape[1], _INNER), torch.nn.ReLU(), torch.nn.Linear(_INNER, num_bins)
    )
    optimizer = torch.optim.AdamW(network.parameters(), recipe.rate)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.num_epochs)
    best, kept, worse = float("inf"), [p.detach().clone() for p in network.parameters()], 0
    for epoch in range(recipe.num_epochs):
        for rows in torch.randperm(len(states)).split(recipe.batch_rows):
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
    """-ln P of the true bin; of an answer that was cut off, of that bin and all above."""
    losses = cross_entropy(logits, bins, reduction="none")
    if is_cut.any():
        log_p = logits[is_cut].log_softmax(dim=-1)
        above = torch.arange(logits.shape[1])[None] >= bins[is_cut][:, None]
        losses[is_cut] = -log_p.masked_fill(~above, -torch.inf).logsumexp(dim=-1)
    return losses.mean()


def _base(bins: NDArray[np.int64], ages: NDArray[np.int64], num_bins: int) -> NDArray[np.float64]:
    """ln P(bin | band of ages); a band that was never seen is as the one before."""
    bands = np.searchsorted(BAND_AGES, ages, side="right") - 1
    counts = np.zeros((BAND_AGES.size, num_bins))
    np.add.at(counts, (bands, bins), 1)
    for band in range(1, BAND_AGES.size):
        if not counts[band].any():
            counts[band] = counts[band - 1]
    counts += _PRIOR_ROWS
    base: NDArray[np.float64] = np.log(counts / counts.sum(axis=1, keepdims=True))
    return base


def _weighed(
    recording: Recording, log_p: NDArray[np.float64], reading: Reading, rows: NDArray[np.bool_]
) -> Reading:
    """With the alpha, beta and gamma under which the lengths that were held out are likeliest, all
    bands of ages counting alike: most scores are of the few answers that are long, late in them."""
    best, chosen = -np.inf, reading
    for alpha, beta, gamma in product(*_GRID.values()):
        if beta == 0.0 and (alpha, gamma) != (1.0, 1.0):
            continue
        tried = Reading(reading.edges, reading.band_ages, reading.log_base, alpha, beta, gamma)
        rule = Posterior(tried)
        gains: dict[int, list[float]] = {}
        for job, age, _ in _replayed(recording, log_p, rule, rows):
            if (gain := rule.gain(job)) is not None:
                band = int(np.searchsorted(BAND_AGES, age, side="right"))
                gains.setdefault(band, []).append(gain)
        mean = float(np.mean([np.mean(of_band) for of_band in gains.values()]))
        if mean > best:
            best, chosen = mean, tried
    return chosen


def _replayed(
    recording: Recording, log_p: NDArray[np.float64], rule: Posterior, rows: NDArray[np.bool_]
) -> Iterator[tuple[Job, int, int]]:
    """Each chosen row's answer as a job, after its scores: the job, the age, and the answer. All
    answers at once, age by age. The job's age is the answer's length, as if it had ended."""
    jobs: dict[int, Job] = {}
    for age in np.unique(recording.ages[rows]).tolist():
        if not rule.wants(age):
            continue
        here = np.flatnonzero(rows & (recording.ages == age))
        answers = recording.answer[here].tolist()
        for answer in answers:
            if answer not in jobs:
                cap = int(recording.caps[answer])
                jobs[answer] = Job(0, 1, cap, recording.forecasts[answer], 0)
                jobs[answer].generated_tokens = int(recording.lengths[answer])
        rule.refine([jobs[answer] for answer in answers], [age] * len(answers), log_p[here])
        yield from ((jobs[answer], age, answer) for answer in answers)


def forecasts(
    recording: Recording, log_p: NDArray[np.float64], rule: Posterior, rows: NDArray[np.bool_]
) -> Iterator[Forecast]:
    """Of each row: the age, what was left, and what it was foretold to be, with weights."""
    for job, _, answer in _replayed(recording, log_p, rule, rows):
        refined = job.refined
        if refined is not None:
            left = int(recording.lengths[answer]) - refined.age_tokens
            yield refined.age_tokens, left, refined.lengths - refined.age_tokens, refined.weights


def alone(
    recording: Recording,
    log_p: NDArray[np.float64],
    edges: NDArray[np.int64],
    rows: NDArray[np.bool_],
) -> Iterator[Forecast]:
    """The same of the probe alone, its bins at their middles."""
    ends = np.append(edges[:-1], 2 * edges[-2] - edges[-3])
    middles = (ends[:-1] + 1 + ends[1:]) / 2
    for row in np.flatnonzero(rows).tolist():
        age = int(recording.ages[row])
        left = int(recording.lengths[recording.answer[row]]) - age
        yield age, left, middles, np.exp(log_p[row])
