"""Scheduler seams: jobs arrive, the waiting queue is sorted, turns are taken, tokens counted, and
where memory runs out, the last of the order is retracted."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy

from patches.admission import Admission
from patches.ranker import Ranker
from patches.refusals import refuse_model
from patches.seam import AFTER, AROUND, BEFORE, Seam
from patches.step_meter import StepMeter
from patches.turns import turn_taker
from sage_sched.config import SageConfig
from sage_sched.policy import policy_names
from sage_sched.step_time import ServerFacts

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"


def order_seams(config: SageConfig) -> list[Seam]:
    """The hooks for one scheduler process whose --schedule-policy is one of ours."""
    # For the hooks that are given neither scheduler nor policy.
    ranker: Ranker | None = None
    admission = Admission(config.policy.admission_quantile)

    def around_validate(original: Any, self: Any, policy: str, tree_cache: Any) -> Any:
        # SGLang's enum cannot gain members. Under FCFS its code leaves the order as it finds it,
        # and does the rest (prefix matches for load snapshots, eviction order) as ever.
        return (
            CacheAgnosticPolicy.FCFS
            if policy in policy_names()
            else original(self, policy, tree_cache)
        )

    def after_init_policy(result: None, self: Any) -> None:
        nonlocal ranker
        refuse_model(self.model_config)
        server = ServerFacts(
            self.max_total_num_tokens,
            self.max_running_requests,
            config.step_time.step_time(),
            swap_token_s=0.0,  # as long as nothing is swapped
        )
        ranker = Ranker(self.schedule_policy, config.policy, server)
        self.policy.sage_ranker = ranker
        self.policy.sage_steps = StepMeter()
        self.policy.sage_turns = turn_taker(self, ranker, admission, config.preemption)

    def after_init_max_new_tokens(result: None, self: Any, req: Any) -> None:
        # The last thing that every new request goes through, in order of arrival, and the first
        # moment at which its cap is known. Once more for some that are about to be aborted.
        if not hasattr(req, "sage_job"):
            self.policy.sage_ranker.arrived(req)

    def around_prefill_pass(original: Any, self: Any, running_batch: Any) -> Any:
        turns = self.policy.sage_turns
        if turns is None:
            return original(self, running_batch)
        return turns.take_turns(partial(original, self), running_batch)

    def around_timeouts(original: Any, self: Any) -> Any:
        # On the entry rank only.
        turns = self.policy.sage_turns
        return original(self) if turns is None else turns.without_swapped(partial(original, self))

    def around_queue_limit(original: Any, self: Any, recv_req: Any) -> Any:
        turns = self.policy.sage_turns
        call = partial(original, self, recv_req)
        return call() if turns is None else turns.without_swapped(call)

    def after_flush_cache(success: bool, self: Any, *args: Any, **kw: Any) -> None:
        if success and self.policy.sage_turns is not None:
            self.policy.sage_turns.mover.forget_copies()

    def before_calc_priority(self: Any, waiting_queue: list[Any], *args: Any, **kw: Any) -> None:
        self.sage_ranker.sort(waiting_queue)

    def around_retraction_order(original: Any, reqs: list[Any]) -> list[int]:
        order: list[int] = original(reqs)
        return order if ranker is None else ranker.kept_order(reqs, order)

    def after_adder_init(result: None, self: Any, *args: Any, **kw: Any) -> None:
        admission.correct(self)

    def around_add_one(original: Any, self: Any, req: Any, *args: Any, **kw: Any) -> Any:
        return admission.around_add_one(original, self, req, *args, **kw)

    def before_run_batch(self: Any, batch: Any, *args: Any, **kw: Any) -> None:
        # A batch that goes on to decode keeps the extend_num_tokens of its prefill.
        prefills = batch.forward_mode.is_extend_without_speculative()
        self.policy.sage_ranker.served(batch.extend_num_tokens if prefills else len(batch.reqs))
        self.policy.sage_steps.launched(batch, after_idle=self._sched_idled)

    def after_internal_state(result: Any, self: Any, recv_req: Any) -> None:
        turns = self.policy.sage_turns
        result.internal_state["sage"] = {
            **self.policy.sage_ranker.stats(),
            "preemption": None if turns is None else turns.stats(),
            "steps": self.policy.sage_steps.windows(),
        }

    return [
        Seam(
            f"{_POLICY}._validate_and_adjust_policy",
            AROUND,
            around_validate,
            ("policy", "tree_cache"),
        ),
        Seam(f"{_SCHEDULER}.init_schedule_policy", AFTER, after_init_policy, ()),
        Seam(f"{_SCHEDULER}.init_req_max_new_tokens", AFTER, after_init_max_new_tokens, ("req",)),
        Seam(
            f"{_SCHEDULER}.get_new_batch_prefill", AROUND, around_prefill_pass, ("running_batch",)
        ),
        Seam(f"{_SCHEDULER}._poll_timeout_aborts", AROUND, around_timeouts, ()),
        Seam(f"{_SCHEDULER}._abort_on_queued_limit", AROUND, around_queue_limit, ("recv_req",)),
        Seam(f"{_SCHEDULER}.flush_cache", AFTER, after_flush_cache, ()),
        Seam(f"{_POLICY}.calc_priority", BEFORE, before_calc_priority, ("waiting_queue",)),
        Seam(f"{_BATCH}._get_decode_retraction_order", AROUND, around_retraction_order, ("reqs",)),
        Seam(f"{_ADDER}.__init__", AFTER, after_adder_init, ("running_batch", "new_token_ratio")),
        Seam(f"{_ADDER}.add_one_req", AROUND, around_add_one, ("req",)),
        Seam(f"{_SCHEDULER}.run_batch", BEFORE, before_run_batch, ("batch",)),
        Seam(f"{_SCHEDULER}.get_internal_state", AFTER, after_internal_state, ("recv_req",)),
    ]
