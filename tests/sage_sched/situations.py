"""A notation for situations and plans, so that a test of a decision is one line.

A situation: `run 0:500; wait 1:20 2:30!; full`. Jobs are `arrival:input_tokens` with marks:
`!` has passed the starvation bound, `~` swapped, `?` unranked, `k` keeps its memory, `<N` the cap
(10, or 4096 with a prediction), `+N` generated tokens, `/N` prefilled tokens, `@N` its level, `#N`
how often it was preempted, `=N` the tokens that it frees, `%N,MxK` its predicted lengths, M of them
K, `uN` its urgency, `sN` the server's work until it came.

A plan: `-0 +1 ^3 2; open 1`. `-` swaps a job out, `=` leaves it to be computed again, `+` admits,
`^` resumes; bare jobs stay behind, in their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sage_sched.job import Hints, Job
from sage_sched.limits import Limits
from sage_sched.order import serving_order
from sage_sched.plan import Plan, Preempt, PreemptionMode, Resume
from sage_sched.policy import NoParameters, Policy
from sage_sched.view import Holding, SchedulerView
from tests.sage_sched.strategies import SERVER, decide, known, named, waiting

_JOB = re.compile(r"(-?\d+):(\d+)(\S*)")
_MARK = re.compile(r"([!~?k])|([<+/@#=us])(-?\d+)|%([\d,x]+)")
_FIELDS = {
    "<": "max_new_tokens", "+": "generated_tokens", "/": "prefilled_tokens", "@": "level",
    "#": "num_preemptions", "=": "held_tokens", "s": "served_at_arrival_tokens",
}  # fmt: skip
_FLAGS: dict[str, dict[str, Any]] = {
    "!": {"passed_starvation_bound": True},
    "?": {"is_ranked": False},
    "k": {"keeps_memory": True},
    "~": {},
}


class ByInput(Policy):
    """The shortest prompt first; it pushes out any that is longer."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return float(job.input_tokens)

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return waiting.input_tokens < running.input_tokens


def _about(flag: str, sign: str, number: str, lengths: str) -> dict[str, Any]:
    """The fields of a job that a mark sets."""
    if lengths:
        atoms = [atom.split("x") for atom in lengths.split(",")]
        each = [int(length) for length, *times in atoms for _ in range(int((*times, 1)[0]))]
        return {"distribution": known(*each), "max_new_tokens": 4096}
    if sign == "u":
        return {"hints": Hints(urgency=int(number))}
    return _FLAGS[flag] if flag else {_FIELDS[sign]: int(number)}


def _jobs(text: str) -> tuple[list[Job], dict[Job, None]]:
    """The jobs, and those of them that are swapped."""
    jobs, swapped = [], {}
    for arrival, input_tokens, marks in _JOB.findall(text):
        about: dict[str, Any] = {
            "max_new_tokens": 10, "distribution": None, "served_at_arrival_tokens": 0,
        }  # fmt: skip
        for mark in _MARK.findall(marks):
            about |= _about(*mark)
        jobs.append(Job(int(arrival), int(input_tokens), **about))
        if "~" in marks:
            swapped[jobs[-1]] = None
    return jobs, swapped


def _tokens_of(arrivals: list[int], whose: int, num_tokens: int, position: int) -> int:
    return num_tokens if arrivals[position] == whose else 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split()]


def view_of(situation: str) -> SchedulerView:
    """The facts of a pass, as the module's text says."""
    said = dict((f"{part.strip()} ").split(" ", 1) for part in situation.split(";"))
    queue, swapped = _jobs(said.get("wait", ""))
    running, _ = _jobs(said.get("run", ""))
    chunked, _ = _jobs(said.get("chunk", ""))
    arrivals = [job.arrival for job in queue]
    view = replace(
        waiting(*queue), swapped=swapped, running=running, chunked=chunked[0] if chunked else None
    )

    def among(text: str) -> Callable[[int], bool]:
        return lambda position: arrivals[position] in _numbers(text)

    stays_whole = "whole" in said
    frees = {job: job.held_tokens for job in running if "=" in said["run"] and job.held_tokens}
    stay = _numbers(said.get("stay", ""))
    about: dict[str, Any] = {
        "holding": lambda job: (
            None
            if job.arrival in stay
            else Holding(job.input_tokens, 0, frees.get(job, job.input_tokens), stays_whole)
        )
    }
    if "full" in said:
        about |= {"batch_is_full": True, "free_slots": 0, "free_tokens": 0}
    if "short" in said:
        about |= {"free_tokens": 0, "step_tokens": len(running)}
    for name, field in (
        ("free", "free_tokens"), ("slots", "free_slots"), ("host", "host_free_tokens"),
        ("page", "page_size"), ("pass", "pass_tokens"), ("served", "served_tokens"),
        ("come", "num_arrivals"),
    ):  # fmt: skip
        if name in said:
            about[field] = int(said[name])
    if "planned" in said:
        about["num_arrivals_planned"] = view.num_arrivals
    if "noswap" in said:
        about |= {"can_swap": False, "may_preempt": False}
    if "nopreempt" in said:
        about["may_preempt"] = False
    if "fits" in said:
        about["has_adapter"] = among(said["fits"])
    if "fits-in-turn" in said:
        about["adapters_in_order"] = lambda: among(said["fits-in-turn"])
    for name in ("shared", "cached"):  # whose tokens, and how many
        if name in said:
            arrival, num_tokens = _numbers(said[name])
            about[f"{name}_tokens"] = partial(_tokens_of, arrivals, arrival, num_tokens)
    if "prefix" in said:  # of how many tokens, and whose
        num_tokens, *alike = _numbers(said["prefix"])

        def common_tokens(position: int, other: int | Job) -> int:
            two = arrivals[position], arrivals[other] if isinstance(other, int) else other.arrival
            return num_tokens if {*two} <= {*alike} else 0

        about["common_tokens"] = common_tokens
    server = SERVER
    if "gap" in said:
        server = replace(server, level_gap=int(said["gap"]))
    if "drafts" in said:
        server = replace(server, reserve_tokens=int(said["drafts"]))
    if "move" in said:  # in microseconds a token
        server = replace(server, swap_token_s=float(said["move"]) / 1e6)
    return replace(view, server=server, **about)


def said_of(plan: Plan, view: SchedulerView) -> str:
    """The plan in the notation of the module's text."""
    if plan.order is None:
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


def decided(
    situation: str,
    policy: str | type[Policy] = ByInput,
    limits: Limits | None = None,
    **parameters: object,
) -> str:
    """The plan for a situation."""
    view = view_of(situation)
    jobs = [*view.waiting, *view.running, *([view.chunked] if view.chunked else [])]
    if isinstance(policy, str):
        made = named(policy, *jobs, server=view.server, **parameters)
    else:
        made = policy(NoParameters(), view.server)
    return said_of(decide(view, made, limits), view)


def order_of(situation: str, policy: str, **parameters: object) -> str:
    """The waiting jobs in the order in which the policy serves them."""
    view = view_of(situation)
    order = serving_order(named(policy, *view.waiting, **parameters), view)
    return " ".join(str(view.waiting[position].arrival) for position in order)
