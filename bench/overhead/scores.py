"""What scores cost the scheduler's host a step: `python -m bench.overhead.scores`.

256 requests run, of which as many are due as on average: one in 32, and some that are young. With
that many, scores are told every few passes (patches.probe.scores). Thread time, as others may use
the core.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from patches.probe.scores import PASSES_A_MESSAGE
from sage_sched.config import StepTimeConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.policies.sage import Sage, SageParameters
from sage_sched.probe.posterior import Posterior, Reading
from sage_sched.probe.refining import Refining, from_steps, in_steps
from sage_sched.steps.time import ServerFacts

_NUM_RUNNING = 256
_NUM_DUE = _NUM_RUNNING // 32 + 2
_NUM_TOLD = _NUM_DUE * PASSES_A_MESSAGE
_CAP_TOKENS = 4096


def main() -> None:
    """Milliseconds a step, on every rank: scores in, posterior, indices, orders."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    rng = np.random.default_rng(0)
    server = ServerFacts(72_000, _NUM_RUNNING, StepTimeConfig().step_time(), 1e-5)
    policy = Sage(SageParameters(posterior=True), server)
    edges = np.array([0, *np.unique(np.geomspace(1, 4096, 20).astype(int)), 1 << 24])
    bins = edges.size - 1
    base = np.log(np.full((1, bins), 1 / bins))
    refining = Refining(Posterior(Reading(edges, np.array([0]), base)), policy)
    jobs = []
    for arrival in range(_NUM_RUNNING):
        known = LengthDistribution.from_samples(rng.integers(1, 2000, 64), "history")
        job = Job(arrival, 500, _CAP_TOKENS, known, 0)
        policy.on_arrival(job)
        refining.arrived(job)
        jobs.append(job)
    spent_ms = []
    for message in range(1, 200):
        first = message * _NUM_TOLD
        due = [(first + i) % _NUM_RUNNING for i in range(_NUM_TOLD)]
        ages = [32 * (1 + (first + i) // _NUM_RUNNING) for i in range(_NUM_TOLD)]
        logits = rng.normal(size=(_NUM_TOLD, bins))
        began_s = time.thread_time()
        refining.scored(due, ages, from_steps(in_steps(logits)))
        spent_ms.append(1e3 * (time.thread_time() - began_s))
    # The first time around, priors are spread over cells.
    num_new = -(-_NUM_RUNNING // _NUM_TOLD)
    new, later = np.median(spent_ms[:num_new]), np.array(spent_ms[num_new:])
    print(
        f"{_NUM_DUE} of {_NUM_RUNNING} due a step, told every {PASSES_A_MESSAGE} steps: "
        f"{np.median(later) / PASSES_A_MESSAGE:.2f} ms a step, {np.median(later):.2f} a message "
        f"({np.percentile(later, 99):.2f} at p99), {new:.2f} of new requests"
    )


if __name__ == "__main__":
    main()
