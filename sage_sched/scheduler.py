"""Schedules the jobs of one server. Open this file first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from sage_sched.admission import with_admissions
from sage_sched.candidates import Candidates, may_enter_full
from sage_sched.headroom import Headroom
from sage_sched.job import Job
from sage_sched.last_plan import LastPlan
from sage_sched.limits import Limits
from sage_sched.overload import Newcomer, Refusal
from sage_sched.plan import UNLIMITED, Budget, NextPlan, Plan
from sage_sched.policy import FcfsFill, NoParameters, Policy
from sage_sched.preemption import lacks_memory, preempt_for_memory, retention_order
from sage_sched.steps import ServerFacts
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue

# A plan looks up the cached prefixes of this many jobs at the head of the queue.
_NUM_LOOKED_UP = 8
# A plan tries again after this many steps if a job may enter a full batch, but has found no room.
_RETRY_STEPS = 32


class Scheduler:
    """Decides in which order the jobs of one server are served, which of them run, and which are
    refused.

    Each tensor-parallel rank has one, and all decide alike. An engine (SGLang with patches, or
    bench/simulator) reports events. Before a step it asks for a plan, and carries it out
    (sage_sched.scheduling_pass). Only this class calls the policy and the limits on behalf of an
    engine.

    policy: orders the jobs. queue: the waiting jobs in its order. limits: hold under every policy.
    now_s: rank 0's clock, as broadcast, in seconds from an arbitrary moment.
    served_tokens: tokens prefilled and decoded so far. num_arrivals: how many jobs have come.
    last_plan: whether the last plan still stands. headroom: of the last plan.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        headroom: Headroom,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """headroom: until there is a plan. on_failure: called in the `except` block if the policy
        fails, with the task that failed. None: the error is raised."""
        self.policy, self.limits, self.headroom = policy, limits, headroom
        self.queue = WaitingQueue(policy)
        self._on_failure = on_failure
        self.now_s = 0.0
        self.served_tokens = self.num_arrivals = 0
        self.last_plan = LastPlan()

    def arrived(self, job: Job) -> None:
        """Note that a job has come, after all jobs before it."""
        job.ranked_at = self.queue.revision
        self.num_arrivals += 1
        self.limits.arrived(job)
        self._rank(job)
        self.last_plan.came(job)

    def _rank(self, job: Job) -> None:
        """Let the policy rank a job. If it fails, the job goes first from now on."""
        try:
            self.policy.rank(job)
        except Exception as error:
            job.pass_starvation_bound()
            self._failed("rank a request", error)

    def found(self, job: Job, cached_tokens: int, host_tokens: int, server: ServerFacts) -> bool:
        """Note how much of a job's prompt is cached (Kv.cached); return whether it has changed."""
        job.was_looked_up = True
        recall_tokens = server.recall_tokens(host_tokens) if host_tokens else 0
        if (cached_tokens, recall_tokens) == (job.cached_tokens, job.recall_tokens):
            return False
        job.cached_tokens, job.recall_tokens = cached_tokens, recall_tokens
        job.changes()
        self._rank(job)
        return True

    def newcomer(self, job: Job, server: ServerFacts) -> Newcomer:
        """Return the latest job with the facts for its predicted times."""
        return self.limits.overload.newcomer(job, self.policy, server, self.now_s)

    def refuses(
        self, job: Job, newcomer: Newcomer, *, may_refuse: bool, others_wait: bool = True
    ) -> Refusal | None:
        """Decide whether the latest job is refused (Overload.refuses)."""
        return self.limits.overload.refuses(
            job, newcomer, self.now_s, may_refuse=may_refuse, others_wait=others_wait
        )

    def prefilled(self, jobs: Sequence[Job], num_tokens: Sequence[int], num_pairs: float) -> None:
        """Note a prefill step: how many tokens of each job, and of how many pairs (StepTime)."""
        self.worked(jobs, num_tokens)
        for limit in self.limits.hearing["prefilled"]:
            limit.prefilled(len(jobs), sum(num_tokens), num_pairs)

    def decoded(self, num_tokens: int) -> None:
        """Note decode steps. The engine counts their tokens in Job.served_tokens itself."""
        self.served_tokens += num_tokens
        for limit in self.limits.hearing["decoded"]:
            limit.decoded()

    def worked(self, jobs: Iterable[Job], num_tokens: Iterable[int]) -> None:
        """Count tokens that were computed for these jobs."""
        for job, number in zip(jobs, num_tokens, strict=True):
            job.served_tokens += number
            self.served_tokens += number

    def refined(self, jobs: Sequence[Job]) -> None:
        """Note that the predictions of these jobs were refined (Job.refined)."""
        self.last_plan.reordered()
        for job in jobs:
            self._rank(job)

    def updated(self, server: ServerFacts) -> None:
        """Take in the server's step times, which have changed."""
        self.queue.revision += 1
        self.last_plan.reordered()
        try:
            self.policy.on_server(server)
        except Exception as error:
            self._failed("take in step times", error)

    def ended(self, job: Job) -> None:
        """Note that a job has ended at its last age, was aborted, or was refused."""
        self.last_plan.ended(job, self.headroom.num_steps)
        for limit in self.limits.hearing["ended"]:
            limit.ended(job, self.now_s)
        try:
            self.policy.on_end(job, self.now_s)
        except Exception as error:
            self._failed("record the end of a request", error)

    def switched(self, policy: Policy, limits: Limits, unfinished: Sequence[Job]) -> None:
        """Use another policy, or the same with other limits. unfinished: all such jobs, by
        arrival."""
        before, is_new = self.limits, policy is not self.policy
        if is_new:
            self.queue.disband()
            self.queue = WaitingQueue(policy)
        self.policy, self.limits = policy, limits
        self.plan_again()
        for job in unfinished:
            if is_new:
                job.forget_policy()
            limits.arrived(job, before)
            if is_new:
                self._rank(job)

    def plan_again(self) -> None:
        """Make another plan at the next pass, even if nothing changes."""
        self.last_plan.expire()

    def first_lacks_memory(self, num_arrivals: int, room_tokens: int) -> bool:
        """Whether the first job of the order still lacks memory (LastPlan), if no event unknown
        here can change the order. num_arrivals: see SchedulerView."""
        fair_shares, adapters, _ = self.limits.engaged
        if fair_shares or adapters or self.policy.traits.moving is not None:
            return False
        self._note_new(num_arrivals)
        return self.last_plan.first_lacks_memory(room_tokens)

    def _note_new(self, num_arrivals: int) -> None:
        if num_arrivals != self.num_arrivals:
            self.last_plan.unseen()
        self.last_plan.note_new(self.now_s, self._enters_full_at_s)

    def may_have_changed(self, num_arrivals: int, ages: Iterable[int], most_tokens: int) -> bool:
        """Whether the plan of a full batch may have changed since the last one: by the time, the
        work done, a new job, or the index of a running one.

        This and the check of memory are cheap enough for each step. The facts of a plan take ten
        times as long.

        ages: how many tokens each running job has generated.
        most_tokens: the most that a step gives a job. Speculative decoding may give several.
        """
        self._note_new(num_arrivals)
        facts = self.now_s, self.served_tokens
        return self.last_plan.has_changed(num_arrivals, *facts, ages, most_tokens)

    def _enters_full_at_s(self, job: Job) -> float:
        """Return when a new job might enter a full batch (Policy.enters_full_at_s): at once if the
        policy fails."""
        _, adapters, _ = self.limits.engaged
        is_like_others = job.level == self.last_plan.level and not job.goes_first
        if not is_like_others or job.batch is not None or adapters is not None:
            return -math.inf
        try:
            return float(self.policy.enters_full_at_s(job))
        except Exception as error:
            self._failed("plan a request", error)
            return -math.inf

    def plan(self, view: SchedulerView) -> Plan:
        """Return the plan of a pass, in order of arrival if the policy fails.

        Call this if memory runs out, a prompt is being chunked, or a job waits; if the batch is
        full, only if the plan may have changed.
        """
        self.last_plan.begins()
        try:
            plan = self._planned(view)
        except Exception as error:
            self._failed("plan a pass", error)
            self.queue.take_joined()  # or a policy that always fails would keep them alive
            # A new policy each time: a kept one would keep the jobs of this pass alive.
            policy = FcfsFill(NoParameters(), self.policy.server)
            spare = Scheduler(policy, Limits(), self.headroom)
            plan, self.headroom = spare._planned(view), spare.headroom
        self.last_plan.made(plan, view)
        return plan

    def _failed(self, task: str, error: Exception) -> None:
        if self._on_failure is None:
            raise error
        self._on_failure(task)

    def _planned(self, view: SchedulerView) -> Plan:
        """Return the plan of one pass. Raises the policy's errors.

        1. If memory runs out, preempt running jobs. The next pass decides which jobs are admitted.
           If another adapter has its turn (Adapters), preempt jobs for it, and go on.
        2. Look the new jobs up in the cache, and order all jobs. If the batch is full and none can
           enter, the plan ends here. Otherwise look up the first jobs, too.
        3. Narrow them to the jobs that may be admitted (Candidates). While a prompt is being
           chunked, these are the jobs that are piggybacked on its next chunk.
        4. Decide which of them are admitted, and which running jobs are preempted for them. If KV
           cannot be swapped, the engine itself admits in this order.

        If SGLang has marked the batch as full, a job is admitted only if it preempts another, goes
        first, or its start is due (Job.starts_now). Admitting others one by one as room appears,
        with a prefill step each, costs more than it gains: mean TTLT was 10 % above that without
        preemption, and with this rule is 1 % below it (srpt-oracle, H800 preset at 8 requests/s).
        """
        policy, limits, queue = self.policy, self.limits, self.queue
        fair_shares, adapters, sessions = limits.engaged
        queue.use(limits.hearing["queued"], fair_shares, adapters)
        queue.follow(view)
        queue.rank_anew(view)
        self.last_plan.next = NextPlan()
        for limit in limits.hearing["look"]:
            limit.look(view, queue.begun)
        self.last_plan.next = wanted = self._wanted(view)
        headroom = policy.traits.headroom(view, sessions)
        self.headroom = replace(headroom, kept_tokens=0)
        if view.running and view.may_preempt and lacks_memory(view):
            preempted = preempt_for_memory(view, policy, headroom)
            if preempted:
                return Plan((), tuple(preempted), budget=self._within(UNLIMITED, view))
        moved = [] if adapters is None else adapters.moves(view)
        at_s = wanted.at_s if adapters is None else min(wanted.at_s, adapters.plan_by_s)
        if moved:
            view = view.without(moved)

        joined = queue.take_joined()
        self._look_up([job for job in joined if not job.was_looked_up], view)
        order = queue.order(view)
        first = [view.waiting[position] for position in order]
        any_enters = may_enter_full(first, policy, view)
        self.last_plan.next = wanted._replace(at_s=at_s)
        if not any_enters or policy.traits.preempts_for_starts:
            at_s = min(at_s, *(limit.next_s for limit in limits.all))
            at_tokens = min(wanted.at_tokens, *(limit.next_tokens for limit in limits.all))
            if any_enters:  # its victims may be in a step, for example
                at_tokens = min(at_tokens, view.served_tokens + _RETRY_STEPS * len(view.running))
            elif first:
                self.last_plan.level = first[0].level
            self.last_plan.next = NextPlan(at_s, at_tokens, interval_tokens=0)
        if view.batch_is_full and view.can_swap and view.chunked is None and not any_enters:
            self.headroom = headroom
            queue.ordered(order)
            return Plan(order, is_new=True, places=self._places(joined, order))
        if self._look_up(first[:_NUM_LOOKED_UP], view):
            order = queue.order(view)
        has_budget = type(policy).budget is not Policy.budget
        budget = policy.budget(view, queue) if has_budget else None
        budget = self._within(budget or UNLIMITED, view)
        pass_tokens = view.pass_tokens
        if budget.prefill_tokens is not None:
            pass_tokens = min(pass_tokens, budget.prefill_tokens)
        decode_only = budget.prefill_tokens == 0 and bool(view.running)
        chunked = None if decode_only else view.chunked
        candidates = Candidates.of(order, chunked, pass_tokens, policy, view)
        queue.ordered(candidates.order)
        places = self._places(joined, order)
        if decode_only:
            return Plan(candidates.order, decode_only=True, budget=budget, places=places)
        self.headroom = headroom
        plan = Plan(
            candidates.order,
            actions=tuple(action for action, _ in moved),
            has_turn=bool(moved),
            num_too_long=candidates.num_too_long,
            places=places,
        )
        room = min(limit.room for limit in limits.all)
        return with_admissions(plan, candidates, budget, pass_tokens, policy, headroom, view, room)

    def _wanted(self, view: SchedulerView) -> NextPlan:
        """Announce a pass to the policy, and return when it wants the next plan."""
        queue = self.queue
        try:
            wanted = self.policy.on_pass(view, queue)
        finally:
            queue.came.clear()
            queue.left.clear()
        if not isinstance(wanted, NextPlan):
            name = type(self.policy).__name__
            raise TypeError(f"{name}.on_pass returned {wanted!r}, allowed: a NextPlan")
        return wanted

    def _within(self, budget: Budget, view: SchedulerView) -> Budget:
        """Return the budget of a pass, cut to what all limits allow."""
        for limit in self.limits.hearing["within"]:
            budget = limit.within(budget, view)
        return budget

    def _look_up(self, jobs: Sequence[Job], view: SchedulerView) -> bool:
        """Look these waiting jobs up in the cache; return whether the cached tokens of any have
        changed.

        Swapped jobs need no prefill. A streaming session's job must not be looked up: it would lend
        its KV to any other job that asks (SGLang's session/streaming_session.py).
        """
        for job in jobs:
            job.was_looked_up = True
        jobs = [job for job in jobs if job not in view.swapped and not job.keeps_memory]
        found = zip(jobs, [*map(view.kv.cached, jobs)], strict=True)
        changed = [self.found(job, *tokens, view.server) for job, tokens in found]
        return any(changed)

    def _places(self, joined: Sequence[Job], order: Sequence[int]) -> dict[Job, int]:
        """Return Plan.places."""
        queue = self.queue
        number_of = {position: number for number, position in enumerate(order)} if joined else {}
        numbers = {job: number_of.get(queue.positions[job]) for job in joined}
        return {
            job: max(len(order), queue.num_ahead(job)) if number is None else number
            for job, number in numbers.items()
        }

    def retention_order(
        self, jobs: Sequence[Job], default: Sequence[int], view: SchedulerView
    ) -> list[int]:
        """Return the positions of running jobs, from the first to keep to the first to retract;
        default, the engine's own order, if the policy fails."""
        try:
            return retention_order(jobs, self.policy, view)
        except Exception as error:
            self._failed("choose requests to retract", error)
            return [*default]
