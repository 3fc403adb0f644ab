"""A notation for situations and plans, so that a test of a decision takes one line.

A situation: `run 0:500; wait 1:20 2:30!; full`. Jobs are `arrival:input_tokens` with marks:
`!` has passed the starvation bound, `~` swapped, `k` keeps its memory, `f` has a
fixed length, `P` is pinned, `<N` the cap (10, or 4096 with a prediction), `+N` generated tokens,
`/N` prefilled tokens, `@N` its level, `#N` how often it was preempted, `=N` the tokens that it
frees, `%N,MxK` its predicted lengths, M of them K, `sN` the server's work until it came, `vN` the
work for it, `aN` when it came (ms), `uN` its urgency, `wN` its weight, `FN` of its first token,
`dN` and `pN` its TTFT and TPOT targets (ms), `[C/A]` its class and tenant, who take turns. After
`gone` come jobs that have ended.

A plan: `-0 +1 ^3 2; open 1`. `-` swaps a job out, `=` leaves it to be computed again, `+` admits,
`^` resumes; bare jobs stay behind, in their order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sage_sched.distribution import UNKNOWN
from sage_sched.job import Hints, Job
from sage_sched.limits import Limits
from sage_sched.plan import Plan, Preempt, PreemptionMode, Resume
from sage_sched.policy import NoParameters, Policy
from sage_sched.steps import ServerFacts
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.strategies import SERVER, StandInKv, core_of, known, named, planned, waiting

_JOB = re.compile(r"(-?\d+):(\d+)(\S*)")
_MARK = re.compile(r"([!~kfP])|([<+/@#=svaudpwF])(-?\d+)|%([\d,x]+)|\[([\w/]+)\]")
_FIELDS = {
    "<": "max_new_tokens", "+": "generated_tokens", "/": "prefilled_tokens", "@": "level",
    "#": "num_preemptions", "=": "held_tokens", "s": "served_at_arrival_tokens",
    "v": "served_tokens",
}  # fmt: skip
_HINTS = {
    "u": "urgency", "w": "weight", "d": "ttft_slo_ms", "p": "tpot_slo_ms",
    "F": "first_token_weight",
}  # fmt: skip
_FLAGS: dict[str, dict[str, Any]] = {
    "!": {"passed_starvation_bound": True, "goes_first": True},
    "k": {"keeps_memory": True},
    "f": {"has_fixed_length": True},
    "~": {},
    "P": {"is_pinned": True},
}
_NUMBERS = {
    "free": "room_tokens", "slots": "free_slots", "host": "host_free_tokens",
    "page": "page_size", "pass": "pass_tokens", "served": "served_tokens", "come": "num_arrivals",
    "locked": "locked_tokens",
}  # fmt: skip


class ByInput(Policy):
    """Serves the shortest prompt first. It preempts any longer one."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return float(job.input_tokens)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return waiting.input_tokens < running.input_tokens


class HoldsLeastUrgent(ByInput):
    """Jobs of urgency 5 wait until no other waits or runs."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return math.inf if job.hints.urgency == 5 else super().key(job, view)


def _marked(marks: str) -> dict[str, Any]:
    """Return the fields of a job that its marks set."""
    about: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    for flag, sign, number, lengths, tenant in _MARK.findall(marks):
        if lengths:
            atoms = [atom.split("x") for atom in lengths.split(",")]
            each = [int(length) for length, *times in atoms for _ in range(int((*times, 1)[0]))]
            about |= {"distribution": known(*each), "max_new_tokens": 4096}
        elif tenant:
            slo_class, _, name = tenant.rpartition("/")
            hints |= {"tenant": name, "slo_class": slo_class, "shares_fairly": True}
        elif sign in _HINTS:
            hints[_HINTS[sign]] = int(number)
        elif sign == "a":
            about["arrival_s"] = int(number) / 1e3
        else:
            about |= _FLAGS[flag] if flag else {_FIELDS[sign]: int(number)}
    return about | ({"hints": Hints(**hints)} if hints else {})


def _jobs(text: str, met: dict[int, Job]) -> tuple[list[Job], dict[Job, None]]:
    """Return all jobs, and the swapped ones. met: jobs by arrival, which are changed."""
    jobs, swapped = [], {}
    for arrival, input_tokens, marks in _JOB.findall(text):
        about = _marked(marks)
        predicted = about.pop("distribution", UNKNOWN)
        new = Job(int(arrival), int(input_tokens), 10, predicted, 0, adapter=arrival)
        job = met.setdefault(int(arrival), new)
        for name, value in about.items():
            if getattr(job, name) != value:
                setattr(job, name, value)
                job.changes()
        jobs.append(job)
        if "~" in marks:
            swapped[job] = None
    return jobs, swapped


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


def _tokens_of(text: str) -> dict[int, int]:
    """Return tokens by the job's arrival."""
    numbers = _numbers(text)
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


def view_of(situation: str, met: dict[int, Job] | None = None) -> SchedulerView:
    """Return the view of a pass from the notation. met: the jobs of earlier passes."""
    said = dict((f"{part.strip()} ").split(" ", 1) for part in situation.split(";"))
    met = {} if met is None else met
    _jobs(said.get("gone", ""), met)
    queue, swapped = _jobs(said.get("wait", ""), met)
    running, _ = _jobs(said.get("run", ""), met)
    chunked = next(iter(_jobs(said.get("chunk", ""), met)[0]), None)
    view = replace(waiting(*queue), swapped=swapped, running=running, chunked=chunked)

    stays_whole = "whole" in said
    frees = {job: job.held_tokens for job in running if "=" in said["run"] and job.held_tokens}
    stay = _numbers(said.get("stay", ""))
    about: dict[str, Any] = {}
    kv = StandInKv(
        holding=lambda job: (
            None
            if job.arrival in stay
            else Holding(job.input_tokens, 0, frees.get(job, job.input_tokens), stays_whole)
        )
    )
    if "full" in said:
        about |= {"batch_is_full": True, "free_slots": 0, "room_tokens": 0}
    if "short" in said:
        about |= {"room_tokens": 0, "step_tokens": len(running)}
    about |= {field: int(said[name]) for name, field in _NUMBERS.items() if name in said}
    if "now" in said:
        about["now_s"] = float(said["now"])
    if "noswap" in said:
        about |= {"can_swap": False, "may_preempt": False}
    if "nopreempt" in said:
        about["may_preempt"] = False
    if "fits" in said:  # each job has an adapter of its own
        names = {*said["fits"].split(), *(job.adapter for job in running)}
        vars(kv)["fits_adapters"] = names.issuperset
    tokens_of = {name: _tokens_of(said.get(name, "")) for name in ("shared", "cached")}
    vars(kv)["shared_tokens"] = lambda job: tokens_of["shared"].get(job.arrival, 0)
    vars(kv)["cached"] = lambda job: (tokens_of["cached"].get(job.arrival, 0), 0)
    if "prefix" in said:  # of how many tokens, and whose
        num_tokens, *alike = _numbers(said["prefix"])

        def common_tokens(job: Job, other: Job) -> int:
            return num_tokens if {job.arrival, other.arrival} <= {*alike} else 0

        vars(kv)["common_tokens"] = common_tokens
    facts = {"gap": "level_gap", "drafts": "reserve_tokens"}
    of_server: dict[str, Any] = {facts[name]: int(said[name]) for name in {*facts} & {*said}}
    if "move" in said:  # in microseconds a token
        of_server["swap_token_s"] = float(said["move"]) / 1e6
    return replace(view, server=replace(SERVER, **of_server), kv=kv, **about)


def said_of(plan: Plan | None, view: SchedulerView) -> str:
    """Return the plan in the notation."""
    if plan is None:
        return "nothing"
    words, num_in = [], 0
    for action in plan.actions:
        if isinstance(action, Preempt):
            sign = "-" if action.mode is PreemptionMode.SWAP else "="
        else:
            assert view.waiting[plan.order[num_in]] is action.job
            num_in += 1
            sign = "^" if isinstance(action, Resume) else "+"
        words.append(f"{sign}{action.job.arrival}")
    words += [str(view.waiting[position].arrival) for position in plan.order[num_in:]]
    rest = {
        "open": plan.num_open,
        "chunk": plan.budget.chunk_tokens,
        "prefill": plan.budget.prefill_tokens,
        "too-long": plan.num_too_long,
        "no-host-room": plan.num_without_host_room,
    }
    parts = [" ".join(words), *(f"{name} {number}" for name, number in rest.items() if number)]
    return "; ".join([*parts, *(["decode-only"] if plan.decode_only else [])])


class Story:
    """The passes of one server, one after another. The same name means the same job."""

    def __init__(
        self,
        policy: str | type[Policy] = ByInput,
        limits: Limits | None = None,
        server: ServerFacts | None = None,
        **parameters: object,
    ) -> None:
        """server: its facts in all passes; None leaves them to the situations."""
        if isinstance(policy, str):
            made = named(policy, server=server or SERVER, **parameters)
        else:
            made = policy(NoParameters(), server or SERVER)
        self.core = core_of(made, limits)
        self.facts = {} if server is None else {"server": server}
        self.jobs: dict[int, Job] = {}

    def view(
        self, situation: str, kv: Mapping[str, Any] | None = None, **facts: Any
    ) -> SchedulerView:
        """Return the view of a pass, after its new jobs have come. kv: see StandInKv."""
        before = {*self.jobs}
        view = replace(view_of(situation, self.jobs), **{**self.facts, **facts})
        vars(view.kv).update(kv or {})
        for arrival in sorted({*self.jobs} - before):
            job = self.jobs[arrival]
            self.core.limits.arrived(job)
            self.core.policy.rank(job)
        return view

    def plan(self, situation: str, **facts: Any) -> str:
        view = self.view(situation, **facts)
        self.core.last_plan.num_arrivals = view.num_arrivals if "planned" in situation else -1
        return said_of(planned(self.core, view), view)


def without_adapters(story: Story, situation: str) -> Story:
    """Plan a situation, and then as if no job had an adapter."""
    story.plan(situation)
    story.core.limits = Limits()
    story.plan(situation)
    return story


def decided(
    situation: str,
    policy: str | type[Policy] = ByInput,
    limits: Limits | None = None,
    **parameters: object,
) -> str:
    """Return the plan for a situation."""
    return Story(policy, limits, view_of(situation).server, **parameters).plan(situation)


def order_of(situation: str, policy: str, **parameters: object) -> str:
    """Return the waiting jobs in the policy's order."""
    story = Story(policy, **parameters)
    view = story.view(situation)
    order = story.core.queue.order(view)
    return " ".join(str(view.waiting[position].arrival) for position in order)
