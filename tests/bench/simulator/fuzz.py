"""Random traffic on random engines, simulated: `python -m tests.bench.simulator.fuzz`.

Pools, pages, chunks and step times are small or large. Hints and settings are extreme, and
predictions wrong. Requests have adapters and sessions, share prefixes, and follow one another. The
policy changes on the way. The invariants are in invariants.py, and here are two more. Under sage,
each job passes the starvation bound (sage_sched.starvation_bound) in the right pass, by an account
that forgets nothing. A run ends within the number of events that its tokens allow.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import random
import sys
import time
import traceback
import warnings
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from bench.simulator.presets import WRITE_POLICIES, Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.result import Result
from bench.simulator.run import check_requests, engine_and_policy, make_node, result_of
from bench.simulator.state import EngineState, Options
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names, policy_type, section_of
from sage_sched.fields import ConfigError
from sage_sched.job import LEAST_SLO_MS, LEAST_WEIGHT, MOST_SLO_MS, MOST_WEIGHT, Hints, Job
from sage_sched.overload.config import OverloadConfig
from sage_sched.plan import Plan
from sage_sched.policy import Policy
from sage_sched.scheduler import Scheduler
from sage_sched.steps import StepTime
from sage_sched.view import SchedulerView
from tests.bench.simulator.invariants import check_promises, check_state
from tests.bench.simulator.traffic import STEP_TIME, known, request

# Half of the runs are of sage, to check promises too.
_POLICIES = [*policy_names(), *["sage"] * len(policy_names())]
_NUMBERS = (
    0, 5e-324, 1e-310, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 1, 8, 1e3, 1e9, 1e17, 1e308, math.inf, 2**31,
)  # fmt: skip
_TIMES_MS = (None, LEAST_SLO_MS, 50.0, 1000.0, MOST_SLO_MS)
_WEIGHTS = (LEAST_WEIGHT, 1.0, 1.0, MOST_WEIGHT)
# Events between two checks of a pool. Checks then take half of the time.
_CHECKED = 16
# A pass serves a token at least, unless requests only move. KV may be computed again.
_EVENTS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One run. switches: the policy that takes over, by time."""

    engine: Engine
    config: SageConfig
    requests: list[SimRequest]
    preempt: bool
    policy: str
    switches: dict[float, str]


def draw(seed: int, policy: str = "") -> Case:
    """Return the case of a seed. Without a policy, the seed chooses one."""
    rng = random.Random(seed)
    engine = _engine(rng)
    requests = _with_more(random.Random(f"more {seed}"), _requests(rng, engine))
    drawn = rng.choice(_POLICIES)
    policy = policy or drawn
    switches: dict[float, str] = {}
    if rng.random() < 0.3:
        at_s = sorted(rng.uniform(0, 2) * requests[-1].arrival_s for _ in range(2))
        switches = {when_s: rng.choice(_POLICIES) for when_s in at_s}
    config = _config(rng, {policy, *switches.values()})
    predicts_waits = all(
        policy_type(one).traits.predicts_waits for one in (policy, *switches.values())
    )
    if rng.random() < 0.3 and predicts_waits:
        overload = OverloadConfig(
            enabled=True,
            max_ttft_ms=rng.choice([1.0, 1000.0, 60_000.0]),
            max_tpot_ms=rng.choice([1.0, 100.0, math.inf]),
        )
        config, requests = replace(config, overload=overload), _in_a_rush(rng, requests)
    return Case(engine, config, requests, rng.random() < 0.8, policy, switches)


def _engine(rng: random.Random) -> Engine:
    page_size = rng.choice([1, 1, 1, 16, 64])

    def in_pages(*choices: int) -> int:
        return page_size * max(1, rng.choice(choices) // page_size)

    chunk_tokens = in_pages(16, 64, 128, 512, 8192)
    least = {"prefill_base_s": 1e-4, "prefill_token_s": 1e-6, "decode_base_s": 1e-3}
    times = {
        name: max(least.get(name, 0.0), rng.choice([0.0, seconds, 10 * seconds]))
        for name, seconds in dataclasses.asdict(STEP_TIME).items()
    }
    return Engine(
        StepTime(**times),
        max(4 * page_size, in_pages(600, 1500, 5000, 20_000)),
        rng.choice([1, 2, 4, 16, 64]),
        page_size,
        chunk_tokens,
        max(chunk_tokens, 16_384),
        mixed_chunk=rng.random() < 0.4,
        swap_token_s=rng.choice([0.0, 1e-6, 1e-4]),
        host_pool_tokens=rng.choice([0, 300, 2000, 1 << 60]),
        hicache_ratio=rng.choice([0, 0, 0, 0.5, 3.0]),
        hicache_write_policy=rng.choice(WRITE_POLICIES),
        max_loras_per_batch=rng.choice([1, 2, 8]),
    )


def _config(rng: random.Random, policies: set[str]) -> SageConfig:
    """Return some of the allowed settings."""
    config: dict[str, Any] = {
        "decode": {
            "max_gap_ms": rng.choice([1.0, 50.0, 1000.0, math.inf]),
            "max_swapped_ms": rng.choice([1.0, 500.0, 60_000.0, math.inf]),
        },
        "policy": {},
    }
    for section in sorted(map(section_of, policies)):
        for one in dataclasses.fields(policy_type(section).Parameters):
            if one.type not in ("float", "int") or rng.random() < 0.5:
                continue
            tried = {**config["policy"].get(section, {}), one.name: rng.choice(_NUMBERS)}
            tried = {"policy": {**config["policy"], section: tried}}
            with contextlib.suppress(ConfigError):
                SageConfig.parse(config | tried)
                config |= tried
    return SageConfig.parse(config)


def _requests(rng: random.Random, engine: Engine) -> list[SimRequest]:
    num_adapters = rng.choice([1, 1, 3])
    rate = rng.choice([1.0, 5.0, 20.0, 200.0, 5000.0])
    requests: list[SimRequest] = []
    arrival_s = 0.0
    for number in range(rng.choice([20, 50, 100])):
        arrival_s += rng.expovariate(rate) if rng.random() < 0.9 else 0.0
        most = engine.kv_pool_tokens // 2
        input_tokens = min(most, 1 + int(rng.choice([5, 50, 300, 1500]) * rng.uniform(0.2, 1.5)))
        most = engine.kv_pool_tokens - input_tokens - engine.page_size - 1
        cap = max(1, min(most, rng.choice([1, 20, 200, 1000, 5000])))
        output_tokens = max(1, min(cap, int(rng.choice([1, 10, 100, 800]) * rng.uniform(0.1, 2))))
        errors = [rng.choice([0.01, 0.5, 1, 2, 30]) for _ in range(rng.choice([1, 8, 64]))]
        predicted = known(*(max(1, int(output_tokens * error)) for error in errors))
        asked = request(
            arrival_s, input_tokens, output_tokens, cap, spans=_spans(rng, input_tokens),
            distribution=predicted if rng.random() < 0.9 else None,
            follows=rng.randrange(number) if number and rng.random() < 0.15 else None,
            pause_s=rng.choice([0.0, 0.01, 1.0, 30.0]), hints=_hints(rng, number),
            adapter=str(rng.randrange(num_adapters)),
        )  # fmt: skip
        requests.append(asked)
    return requests


def _in_a_rush(rng: random.Random, requests: list[SimRequest]) -> list[SimRequest]:
    """Make a quiet time, and then a flood. The next turn of a refused request never comes, so no
    request waits for another's answer."""
    since_s = rng.choice(requests).arrival_s
    slower, faster = rng.choice([1.0, 10.0, 1000.0]), rng.choice([1.0, 0.1, 1e-3, 0.0])

    def comes_s(request: SimRequest) -> float:
        late_s = max(0.0, request.arrival_s - since_s)
        return slower * min(request.arrival_s, since_s) + faster * late_s

    return [replace(each, arrival_s=comes_s(each), follows=None) for each in requests]


def _with_more(rng: random.Random, requests: list[SimRequest]) -> list[SimRequest]:
    """Give some runs many adapters, and others pinned requests, which may end early."""
    if rng.random() < 0.2:
        num_adapters = rng.choice([2, 4, 20])
        return [replace(each, adapter=str(rng.randrange(num_adapters))) for each in requests]
    if rng.random() < 0.3:  # the next turn of such a request would never come
        return [replace(each, follows=None, is_pinned=rng.random() < 0.3) for each in requests]
    return requests


def _spans(rng: random.Random, input_tokens: int) -> tuple[tuple[int, int, int], ...]:
    """Return a prompt whose beginning others share, or nothing."""
    family, shared_tokens = rng.choice([0, 1, 2, 3]), rng.randint(1, input_tokens)
    if not family:
        return ()
    own = (rng.randrange(1000, 10**9), 0, input_tokens - shared_tokens)
    return ((family, 0, shared_tokens), own)[: 1 + (own[2] > 0)]


def _hints(rng: random.Random, number: int) -> Hints:
    return Hints(
        weight=rng.choice(_WEIGHTS),
        first_token_weight=rng.choice(_WEIGHTS),
        ttft_slo_ms=rng.choice(_TIMES_MS),
        tpot_slo_ms=rng.choice(_TIMES_MS),
        urgency=rng.randint(1, 5),
        session=rng.choice(["", "", "one", "two", f"of {number % 5}"]),
        pause_ms=rng.choice(_TIMES_MS),
        ends_session=rng.random() < 0.05,
        tenant=rng.choice(["", "one", "two", str(number)]),
        slo_class=rng.choice(["", "a class"]),
        shares_fairly=rng.random() < 0.3,
    )


@dataclass(slots=True)
class Account:
    """All jobs that have come, and the jobs whose bound was passed in a pass."""

    jobs: dict[int, Job] = field(default_factory=dict)
    passed: set[Job] = field(default_factory=set)
    num_events: int = 0
    had: dict[Job, int] = field(default_factory=dict)
    since_tokens: int = -1
    regret: float = math.nan

    def switched(self, policy: Policy) -> None:
        """Begin anew if this policy, which takes over, has another starvation bound."""
        if policy.traits.regret != self.regret:
            self.regret, self.since_tokens = policy.traits.regret, -1

    def audit(self, core: Scheduler) -> None:
        """Compare each pass with this account. It begins at the first pass with a starvation
        bound."""
        self.switched(core.policy)
        original = core.plan

        def plan(view: SchedulerView) -> Plan:
            if not 0 < self.regret < math.inf:
                return original(view)
            promised = {job for job in self.jobs.values() if job.passed_starvation_bound}
            here = (*view.waiting, *view.running, *view.chunked_jobs)
            for job in here:
                self.jobs.setdefault(job.arrival, job)
            jobs = [self.jobs[arrival] for arrival in sorted(self.jobs)]
            assert sum(job.served_tokens for job in jobs) == view.served_tokens
            if self.since_tokens < 0:
                self.had = {job: job.served_tokens for job in jobs}
                self.since_tokens = view.served_tokens
            served = np.array([job.served_tokens - self.had.get(job, 0) for job in jobs])
            came_at = np.maximum(self.since_tokens, [job.served_at_arrival_tokens for job in jobs])
            behind = np.cumsum(served[::-1])[::-1]
            before = view.served_tokens - came_at - behind
            batch_tokens = max(1, view.locked_tokens)
            passed = behind > self.regret * before + batch_tokens
            self.passed.update(compress(jobs, passed))
            found = original(view)
            for job in here:
                is_promised = job in self.passed or job in promised
                assert job.passed_starvation_bound == is_promised, f"{job} is promised"
            return found

        core.plan = plan  # type: ignore[method-assign]

    def watch(
        self,
        most_events: int,
        state: EngineState,
        before: list[Progress],
        after: list[Progress],
        num_outstanding: int,
    ) -> None:
        """Options.watch."""
        self.num_events += 1
        self.jobs |= {progress.job.arrival: progress.job for progress in before}
        assert self.num_events <= most_events, "it goes on for ever"
        if self.num_events % _CHECKED == 0:
            check_state(state, num_outstanding)
        if len(state.decode) and state.chunked is None:
            check_promises(state, before, after)


def run(case: Case) -> Result:
    """Run a case. Raises the finding."""
    check_requests(case.engine, case.requests)
    account = Account()
    finished: list[Progress] = []
    followers = defaultdict[int | None, list[int]](list)
    for index, each in enumerate(case.requests):
        followers[each.follows].append(index)

    def on_finish(progress: Progress) -> None:
        finished.append(progress)
        for index in followers[progress.index]:
            comes_s = progress.last_token_s + case.requests[index].pause_s
            node.submit(replace(case.requests[index], arrival_s=comes_s), index)

    def policy_of(name: str) -> Policy:
        _, policy = engine_and_policy(case.engine, name, case.config)
        assert isinstance(policy, Policy)
        return policy

    num_tokens = sum(request.input_tokens + request.output_tokens for request in case.requests)
    watch = partial(account.watch, 1000 + _EVENTS_PER_TOKEN * num_tokens)
    options = Options(preempt=case.preempt, watch=watch)
    node = make_node(case.engine, policy_of(case.policy), case.config, options, on_finish)
    account.audit(node.state.core)
    for index in followers[None]:
        node.submit(case.requests[index], index)
    for when_s, name in case.switches.items():
        node.advance(when_s)
        node.switch_to(policy := policy_of(name))
        account.switched(policy)
    node.advance(math.inf)
    return result_of(case.engine, case.requests, finished, [node])


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Simulate random traffic, and check what must hold. Exit code 1 if something "
        "is found."
    )
    parser.add_argument("--seed", type=int, default=0, help="the first; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)s")
    args = parser.parse_args()
    warnings.simplefilter("error")  # a warning is a finding
    end_s = time.monotonic() + 60 * args.minutes
    num_runs = num_found = 0
    while time.monotonic() < end_s:
        try:
            run(draw(seed := args.seed + num_runs))
        except Exception:
            num_found += 1
            print(f"seed {seed}: {traceback.format_exc()}", flush=True)
        num_runs += 1
    print(f"{num_runs} runs, {num_found} findings")
    return int(num_found > 0)


if __name__ == "__main__":
    sys.exit(main())
