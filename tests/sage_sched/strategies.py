"""Hypothesis strategies for the core's nouns."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from bench.policies.sagesched import COSTS
from sage_sched import decide as deciding
from sage_sched.app.config import StepTimeConfig
from sage_sched.distribution import SOURCES, LengthDistribution
from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.plan import Plan
from sage_sched.policy import Policy
from sage_sched.steps import ServerFacts
from sage_sched.view import Holding, SchedulerView

MAX_LENGTH = 5000
SERVER = ServerFacts(
    kv_pool_tokens=10_000,
    max_running_requests=32,
    step_time=StepTimeConfig().step_time(),
    swap_token_s=1e-5,
)


# An idle server with room for all.
IDLE = SchedulerView(
    now_s=0.0,
    served_tokens=0,
    num_arrivals=0,
    num_arrivals_planned=-1,
    waiting=(),
    swapped=(),
    running=(),
    chunked=None,
    batch_is_full=False,
    free_slots=SERVER.max_running_requests,
    free_tokens=SERVER.kv_pool_tokens,
    evictable_tokens=0,
    locked_tokens=0,
    host_free_tokens=1 << 40,
    page_size=1,
    pass_tokens=512,
    step_tokens=0,
    server=SERVER,
    can_swap=True,
    may_preempt=True,
    cached_tokens=lambda position: 0,
    shared_tokens=lambda position: 0,
    has_adapter=lambda position: True,
    host_tokens=lambda position: 0,
    kept_for=dict,
    common_tokens=lambda position, other: 0,
    holding=lambda job: None,
)


def waiting(*jobs: Job, served_tokens: int = 0) -> SchedulerView:
    """Jobs wait, and none has come since the last of them."""
    num_arrivals = max((job.arrival for job in jobs), default=-1) + 1
    return replace(IDLE, waiting=jobs, num_arrivals=num_arrivals, served_tokens=served_tokens)


def decide(view: SchedulerView, policy: Policy, limits: Limits | None = None) -> Plan:
    """The plan of a pass, without limits unless some are given."""
    return deciding.decide(view, policy, limits or Limits())


def job(arrival: int, input_tokens: int = 10, cap: int = 10, **about: object) -> Job:
    return Job(arrival, input_tokens, cap, None, 0, **about)  # type: ignore[arg-type]


def full(view: SchedulerView, *running: Job) -> SchedulerView:
    """A full batch of these jobs, each of which may leave."""
    return replace(
        view,
        running=running,
        batch_is_full=True,
        free_slots=0,
        free_tokens=0,
        holding=lambda job: Holding(job.input_tokens, 0, job.input_tokens, True),
    )


@st.composite
def distributions(draw: st.DrawFn, max_size: int = 40) -> LengthDistribution:
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=max_size))
    weights = draw(st.lists(st.floats(0.01, 10), min_size=len(lengths), max_size=len(lengths)))
    return LengthDistribution.from_samples(lengths, draw(st.sampled_from(SOURCES)), weights)


costs = st.sampled_from([cost_on(SERVER) for cost_on in COSTS.values()])
