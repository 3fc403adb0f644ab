"""Implements TIE, which serves the smallest tail-inflated expectation of an answer's length first,
without preemption."""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy import stats

from sage_sched.distribution import Floats, LengthDistribution
from sage_sched.job import Job
from sage_sched.policy import Policy, Traits
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import MovingKeys

# The paper's constants: the worst tenth of the lengths (CVaR at alpha = 0.9), the limits and the
# slope of beta, the decay while a request waits, and the degrees of freedom of the log-t fit.
_ALPHA = 0.9
_LEAST_BETA, _MOST_BETA, _BETA_SLOPE = 0.1, 0.5, 0.1
_DECAY, _DECAY_S = 0.9, 30.0
_DEGREES = 3.5
# Rounds of the fit, and quantiles that stand for the fitted distribution. More change no order.
_NUM_ROUNDS, _NUM_QUANTILES = 20, 500


class Tie(Policy):
    """Tail Inflated Expectation (Zheng et al., "Scheduling LLM Inference with Uncertainty-Aware
    Output Length Predictions", ICML 2026, arXiv 2604.00499, equation 11), on our distributions.

        key = (E[X] + beta CVaR(X)) 0.9^(wait / 30 s)

    X: the answer's length, cut off at its cap. CVaR: the mean of the longest tenth of X.
    beta: 0.1 times the waiting requests per slot, at least 0.1 and at most 0.5.
    """

    traits = Traits(moving=MovingKeys)

    def rank(self, job: Job) -> None:
        job.memo = self.mean_and_tail(job.distribution, job.max_new_tokens)

    def mean_and_tail(self, lengths: LengthDistribution, cap_tokens: int) -> tuple[float, float]:
        """Return E[X] and CVaR(X) in tokens."""
        capped = lengths.capped(cap_tokens)
        from_longest = capped.weights[::-1]
        before = np.cumsum(from_longest) - from_longest
        in_tail = np.clip(1 - _ALPHA - before, 0.0, from_longest)
        tail = float(capped.lengths[::-1] @ in_tail) / (1 - _ALPHA)
        return capped.mean(), tail

    def key(self, job: Job, view: SchedulerView) -> float:
        assert isinstance(job.memo, tuple)
        mean, tail = job.memo
        queued = len(view.waiting) / self.server.max_running_requests
        beta = min(_MOST_BETA, max(_LEAST_BETA, _BETA_SLOPE * queued))
        waited_s = max(0.0, view.now_s - job.arrival_s)
        return float((mean + beta * tail) * _DECAY ** (waited_s / _DECAY_S))


class TieLogT(Tie):
    """TIE on a log-t distribution that is fitted to each prompt's predicted lengths. The paper
    predicts the fit's two parameters from the prompt by a model of its own."""

    def mean_and_tail(self, lengths: LengthDistribution, cap_tokens: int) -> tuple[float, float]:
        location, scale = fit_log_t(lengths)
        capped = np.minimum(np.exp(location + scale * _quantiles()), cap_tokens)
        num_tail = round(_NUM_QUANTILES * (1 - _ALPHA))
        return float(capped.mean()), float(capped[-num_tail:].mean())


def fit_log_t(lengths: LengthDistribution) -> tuple[float, float]:
    """Return location and scale of the log-t distribution of greatest likelihood, with 3.5 degrees
    of freedom (expectation-maximization of Student's t, Lange et al. 1989)."""
    logs = np.log(lengths.lengths)
    location = float(logs @ lengths.weights)
    scale = max(float(np.sqrt(np.square(logs - location) @ lengths.weights)), 1e-6)
    for _ in range(_NUM_ROUNDS):
        pull = (_DEGREES + 1) / (_DEGREES + np.square((logs - location) / scale))
        pulled = lengths.weights * pull
        location = float(logs @ pulled / pulled.sum())
        scale = max(float(np.sqrt(np.square(logs - location) @ pulled)), 1e-6)
    return location, scale


@cache
def _quantiles() -> Floats:
    """Return quantiles of Student's t at the middles of equal shares, shape (500,)."""
    shares = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    found: Floats = stats.t.ppf(shares, _DEGREES)
    return found
