"""Hypothesis strategies for the core's nouns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from bench.policies.sagesched import COSTS
from sage_sched.app.config import StepTimeConfig
from sage_sched.app.registry import policy_named, policy_type, section_of
from sage_sched.distribution import SOURCES, UNKNOWN, LengthDistribution
from sage_sched.headroom import Headroom
from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.plan import Plan
from sage_sched.policy import Policy
from sage_sched.preemption import lacks_memory
from sage_sched.scheduler import Scheduler
from sage_sched.starvation_bound import StarvationBound
from sage_sched.steps import ServerFacts
from sage_sched.view import Holding, SchedulerView

MAX_LENGTH = 5000
SERVER = ServerFacts(
    kv_pool_tokens=10_000,
    max_running_requests=32,
    step_time=StepTimeConfig().step_time(),
    swap_token_s=1e-5,
)


class StandInKv:
    """Answers as if there were no KV, or by given functions of the same names."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        vars(self).update(answers)

    def cached(self, job: Job) -> tuple[int, int]:
        return 0, 0

    def shared_tokens(self, job: Job) -> int:
        return 0

    def common_tokens(self, job: Job, other: Job) -> int:
        return 0

    def holding(self, job: Job) -> Holding | None:
        return None

    def kept_for(self) -> Mapping[str, int]:
        return {}

    def fits_adapters(self, names: Collection[str]) -> bool:
        return True


# An idle server with room for all.
IDLE = SchedulerView(
    now_s=0.0,
    served_tokens=0,
    num_arrivals=0,
    waiting=(),
    swapped=(),
    running=(),
    chunked=None,
    batch_is_full=False,
    free_slots=SERVER.max_running_requests,
    room_tokens=SERVER.kv_pool_tokens,
    locked_tokens=0,
    host_free_tokens=1 << 40,
    page_size=1,
    pass_tokens=512,
    step_tokens=0,
    server=SERVER,
    can_swap=True,
    may_preempt=True,
    kv=StandInKv(),
)


def waiting(*jobs: Job, served_tokens: int = 0) -> SchedulerView:
    """Return a view in which these jobs wait, and none has come since."""
    num_arrivals = max((job.arrival for job in jobs), default=-1) + 1
    return replace(IDLE, waiting=jobs, num_arrivals=num_arrivals, served_tokens=served_tokens)


def decide(view: SchedulerView, by: Policy | Scheduler, limits: Limits | None = None) -> Plan:
    """Return the plan of a pass, by a scheduler, or by a new one with this policy."""
    return (by if isinstance(by, Scheduler) else core_of(by, limits)).plan(view)


def planned(core: Scheduler, view: SchedulerView) -> Plan | None:
    """Return the plan of a pass, if an engine asks for one. Sets the scheduler's counters."""
    core.now_s, core.served_tokens = view.now_s, view.served_tokens
    if view.chunked is None and not lacks_memory(view):
        if not view.waiting or (view.batch_is_full and not view.can_swap):
            return None
        ages = [job.generated_tokens for job in view.running]
        if view.batch_is_full and not core.may_have_changed(
            view.num_arrivals, ages, view.server.reserve_tokens
        ):
            return None
    return core.plan(view)


def core_of(policy: Policy, limits: Limits | None = None) -> Scheduler:
    """Return a new scheduler with the policy's starvation bound."""
    limits = limits or Limits([StarvationBound(policy.traits.regret)])
    headroom = Headroom(0, IDLE.page_size, SERVER.kv_pool_tokens)
    return Scheduler(policy, limits, headroom)


def known(*lengths: int) -> LengthDistribution:
    """Return equally likely lengths, with little unknown."""
    return LengthDistribution.from_samples(lengths * 1000, "history")


def job(
    arrival: int = 0,
    input_tokens: int = 10,
    cap: int | None = None,
    *,
    lengths: tuple[int, ...] = (),
    age: int = 0,
    served: int = 0,
    **about: object,
) -> Job:
    """lengths: predicted; unknown if empty. cap: by default 10, or 4096 with a prediction. age: its
    generated tokens."""
    predicted = known(*lengths) if lengths else UNKNOWN
    cap = cap or (4096 if lengths else 10)
    made = Job(arrival, input_tokens, cap, predicted, served, **about)  # type: ignore[arg-type]
    made.grow(age)
    return made


def named(name: str, *met: Job, server: ServerFacts = SERVER, **parameters: object) -> Policy:
    """Return a policy that has met these jobs."""
    own = {section_of(name): policy_type(name).Parameters(**parameters)}
    policy = policy_named(name, own, server)
    for one in met:
        policy.rank(one)
    return policy


@st.composite
def distributions(draw: st.DrawFn, max_size: int = 40) -> LengthDistribution:
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=max_size))
    weights = draw(st.lists(st.floats(0.01, 10), min_size=len(lengths), max_size=len(lengths)))
    return LengthDistribution.from_samples(lengths, draw(st.sampled_from(SOURCES)), weights)


costs = st.sampled_from([cost_on(SERVER) for cost_on in COSTS.values()])
