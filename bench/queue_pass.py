"""How long a scheduler takes to admit a request, to sort its waiting queue, to plan who yields, and
to foresee what running requests will still need.

`python -m bench.queue_pass` times patches/ranker.py, sage_sched/plan.py and patches/admission.py,
the code that the scheduler runs, on queues of requests with predicted lengths, and prints a table.
No server is needed. The plan is among 256 running requests that fill slots and pool.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from patches.admission import Admission
from patches.carrier import encode
from patches.ranker import Ranker
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.plan import PLAN_WINDOW, Claimant, Holder, plan_turns
from sage_sched.step_time import ServerFacts

QUEUE_LENGTHS = (100, 1_000, 10_000)
NUM_RUNNING = 256
_NUM_PASSES = 50
_KV_POOL_TOKENS = 500_000


def _request(generator: np.random.Generator, max_atoms: int) -> Any:
    """What the ranker reads of a request (sglang/srt/managers/schedule_batch.py, Req)."""
    lengths = generator.lognormal(5.5, 1.0, max_atoms).astype(np.int64) + 1
    return SimpleNamespace(
        origin_input_ids=range(int(generator.integers(10, 2000))),
        output_ids=[],
        sampling_params=SimpleNamespace(
            max_new_tokens=4096,
            custom_params=encode(LengthDistribution.from_samples(lengths, "warm")),
            ignore_eos=False,
        ),
        kv=SimpleNamespace(kv_allocated_len=500),
        cached_tokens=0,
    )


def _timed_ms(action: Any) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def measure(num_waiting: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each admission, and of each pass with one newcomer since the last."""
    config = SageConfig()
    generator = np.random.default_rng(num_waiting)
    server = ServerFacts(_KV_POOL_TOKENS, 256, config.step_time.step_time(), 1e-5)
    ranker = Ranker("sage", config.policy, server)
    requests = [
        _request(generator, config.predictor.max_atoms) for _ in range(num_waiting + _NUM_PASSES)
    ]
    admissions_ms = [_timed_ms(lambda req=req: ranker.arrived(req)) for req in requests]
    queue, newcomers = requests[:num_waiting], requests[num_waiting:]
    ranker.sort(queue)
    passes_ms = []
    for newcomer in newcomers:
        del queue[0]
        queue.append(newcomer)
        passes_ms.append(_timed_ms(lambda: ranker.sort(queue)))
    return admissions_ms, passes_ms


def measure_plans() -> list[float]:
    """Milliseconds of each plan for one window of waiting requests."""
    config = SageConfig()
    generator = np.random.default_rng(0)
    server = ServerFacts(_KV_POOL_TOKENS, NUM_RUNNING, config.step_time.step_time(), 1e-5)
    ranker = Ranker("sage", config.policy, server)
    requests = [
        _request(generator, config.predictor.max_atoms) for _ in range(NUM_RUNNING + PLAN_WINDOW)
    ]
    for request in requests:
        ranker.arrived(request)
    jobs = [request.sage_job for request in requests]
    claimants = [Claimant(job, job.input_tokens + 4096) for job in jobs[NUM_RUNNING:]]
    plans_ms = []
    for _ in range(_NUM_PASSES):
        for job in jobs[:NUM_RUNNING]:
            job.generated_tokens = int(generator.integers(1, 500))
        holders = [
            Holder(job, job.input_tokens + job.generated_tokens, 0.0) for job in jobs[:NUM_RUNNING]
        ]
        plans_ms.append(
            _timed_ms(
                lambda holders=holders: plan_turns(
                    holders, claimants, free_slots=0, free_tokens=0, policy=ranker.policy,
                    served_tokens=0, max_yields=4,
                )
            )
        )  # fmt: skip
    return plans_ms


def measure_foresight() -> list[float]:
    """Milliseconds to foresee the needs of all running requests, each step one token older."""
    config = SageConfig()
    generator = np.random.default_rng(0)
    server = ServerFacts(_KV_POOL_TOKENS, NUM_RUNNING, config.step_time.step_time(), 1e-5)
    ranker = Ranker("sage", config.policy, server)
    requests = [_request(generator, config.predictor.max_atoms) for _ in range(NUM_RUNNING)]
    for request in requests:
        ranker.arrived(request)
        request.output_ids = [0] * int(generator.integers(1, 500))
    admission = Admission(config.policy.admission_quantile)
    admission.set_aside(requests, 0.5)
    spent_ms = []
    for _ in range(_NUM_PASSES):
        for request in requests:
            request.output_ids.append(0)
        spent_ms.append(_timed_ms(lambda: admission.set_aside(requests, 0.5)))
    return spent_ms


def main() -> None:
    print("waiting   ms a pass: median     p99   ms an admission: median     p99")
    for num_waiting in QUEUE_LENGTHS:
        admissions_ms, passes_ms = measure(num_waiting)
        print(
            f"{num_waiting:7,d} {np.median(passes_ms):19.3f} {np.quantile(passes_ms, 0.99):7.3f}"
            f" {np.median(admissions_ms):25.3f} {np.quantile(admissions_ms, 0.99):7.3f}"
        )
    plans_ms = measure_plans()
    for label, spent_ms in (("plan", plans_ms), ("foresight", measure_foresight())):
        p99_ms = np.quantile(spent_ms, 0.99)
        print(f"ms a {label}: median {np.median(spent_ms):.3f}, p99 {p99_ms:.3f}")


if __name__ == "__main__":
    main()
