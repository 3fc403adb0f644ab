"""The hooks of a scheduler process: jobs arrive, passes follow the policy's plan, admission keeps
the plan's headroom free, tokens are counted, and whom SGLang retracts is the last of the order.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, CacheAgnosticPolicy
from sglang.utils import TypeBasedDispatcher

from patches.engine_types import Batch, Req, Scheduler
from patches.hook import AFTER, AROUND, BEFORE, Hook
from patches.messages import EarlyAbort, Scores, SetSettings, StepTimes, Tick, dispatches
from patches.probe.setup import install_tap
from patches.refusals import refuse_model
from patches.scheduler.admission import add_one, correct
from patches.scheduler.calibration import ends_with_launch
from patches.scheduler.early_aborts import EarlyAborts
from patches.scheduler.executor import run_pass, without_swapped
from patches.scheduler.state import SchedulerState
from patches.scheduler.switch import switch
from sage_sched.config import SageConfig
from sage_sched.registry import policy_names
from sage_sched.routing import answer_tokens

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_LOADS = "sglang.srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"


def scheduler_hooks(config: SageConfig) -> list[Hook]:
    """The hooks for one scheduler process whose --schedule-policy is one of ours."""
    # For the hooks that are given no scheduler.
    state: SchedulerState | None = None
    aborts = EarlyAborts()

    def around_validate(original: Any, self: object, policy: str, tree_cache: Any) -> Any:
        # SGLang's enum cannot gain members. Under FCFS its code leaves the order as it finds it,
        # and does the rest (prefix matches for load snapshots, eviction order) as ever.
        return (
            CacheAgnosticPolicy.FCFS
            if policy in policy_names()
            else original(self, policy, tree_cache)
        )

    def after_init_policy(result: None, self: Scheduler) -> None:
        nonlocal state
        refuse_model(self.model_config)
        state = self.sage = SchedulerState(self, config)

    def after_init_dispatcher(result: None, self: Scheduler) -> None:
        told = [
            (Tick, partial(_ticked, self)),
            (StepTimes, partial(_told, config, self)),
            (Scores, partial(_scored, self)),
            (SetSettings, partial(switch, self)),
            (EarlyAbort, aborts.add),
        ]
        self._request_dispatcher += TypeBasedDispatcher(told)

    def after_init_max_new_tokens(result: None, self: Scheduler, req: Req) -> None:
        # The last thing that every new request goes through, in order of arrival, and the first
        # moment at which its cap is known. Once more for some that are about to be aborted.
        if not hasattr(req, "sage"):
            self.sage.arrived(req)

    def before_add_to_queue(self: Scheduler, req: Req, *args: Any, **kw: Any) -> None:
        # SGLang may have cut the prompt, or put a stub in its place, since it arrived.
        if hasattr(req, "sage"):
            req.sage.job.input_tokens = len(req.origin_input_ids)

    def before_calc_priority(self: object, waiting_queue: list[Req], *args: Any, **kw: Any) -> None:
        if state is not None:
            state.hide_unplanned(waiting_queue)

    def after_generate_request(
        result: None, self: Scheduler, recv_req: Any, *args: Any, **kw: Any
    ) -> None:
        aborts.after(self, recv_req)

    def around_prefill_pass(original: Any, self: Scheduler, running_batch: Batch) -> Any:
        return run_pass(self, partial(original, self), running_batch)

    def around_timeouts(original: Any, self: Scheduler) -> Any:
        # On the entry rank only.
        self.sage.metrics.look()
        told = without_swapped(self, partial(original, self))
        if (news := self.sage.news()) is not None:
            told = [*told, news]
        if self.sage.probing is not None and (scores := self.sage.probing.news()) is not None:
            told = [*told, scores]
        if not self.sage.policy.uses_clock:
            return told
        return [*told, Tick(now_s=time.monotonic())]

    def around_queue_limit(original: Any, self: Scheduler, recv_req: object) -> Any:
        return without_swapped(self, partial(original, self, recv_req))

    def after_flush_cache(success: bool, self: Scheduler, *args: Any, **kw: Any) -> None:
        if success and self.sage.preemption is not None:
            self.sage.preemption.swap.forget_copies()

    def around_chunk_limit(original: Any, *args: Any, **kw: Any) -> int | None:
        theirs: int | None = original(*args, **kw)
        ours = None if state is None else state.chunk_limit_tokens
        return min((limit for limit in (theirs, ours) if limit is not None), default=None)

    def around_retraction_order(original: Any, reqs: list[Req]) -> list[int]:
        order: list[int] = original(reqs)
        return order if state is None else state.retention_order(reqs, order)

    def after_adder_init(result: None, self: Any, *args: Any, **kw: Any) -> None:
        if state is not None:
            correct(state, self)

    def around_add_one(original: Any, self: object, req: Req, *args: Any, **kw: Any) -> Any:
        if state is None:
            return original(self, req, *args, **kw)
        return add_one(state, original, self, req, *args, **kw)

    def around_select_admission(original: Any, self: object, req: Req, **kw: Any) -> Any:
        found = original(self, req, **kw)
        if state is not None and state.settings.is_stock:
            return found
        if kw["has_chunked_req"] and getattr(found, "is_chunked", False):
            # SGLang can track one chunked prompt, and leaves the rest of its chunk to nobody but
            # under shortest-prefill-first, which it knows by name.
            return AddReqResult.OTHER
        return found

    def around_run_batch(
        original: Any, self: Scheduler, batch: Batch, *args: Any, **kw: Any
    ) -> Any:
        self.sage.about_to_run(batch)
        steps, slices = self.sage.calibration.steps, self.sage.slices
        work = steps.launched(batch, after_idle=self._sched_idled)
        cut_s: list[float | None] = []
        layers = 0 if slices is None else slices.layers_of(batch)
        if slices is not None and layers:
            launch = partial(original, self)
            result = slices.run(batch, layers, launch, lambda: cut_s.append(steps.cut()))
        else:
            result = original(self, batch, *args, **kw)
        if ends_with_launch(self.device):
            steps.ended(work, cut_s)
        else:
            result.sage_work = (work, cut_s)
        return result

    def after_batch_result(
        done: None, self: Scheduler, batch: Batch, result: Any, *args: Any, **kw: Any
    ) -> None:
        if not ends_with_launch(self.device):
            self.sage.calibration.steps.ended(*getattr(result, "sage_work", (None,)))
        self.sage.ended(batch)

    def before_attention_backends(self: Any) -> None:
        # Before graphs are captured.
        if not self.is_draft_worker:
            install_tap(self, config.probe, lambda: None if state is None else state.probing)

    def around_pruned_states(original: Any, self: Any, *args: Any, **kw: Any) -> Any:
        pruned = original(self, *args, **kw)
        if (tap := getattr(self, "sage_tap", None)) is not None and pruned[2] is not None:
            tap.capture(captured=pruned[2], sample_rows=pruned[3])
        return pruned

    def after_weights(done: None, self: Any, *args: Any, **kw: Any) -> None:
        if state is not None:
            state.weights_updated()

    def after_internal_state(result: Any, self: Scheduler, recv_req: object) -> None:
        try:
            stats = self.sage.stats()
        except Exception as error:  # whoever asks how it goes must not end it
            logger.exception("/server_info lacks what sage-sched counts")
            stats = {"slo": {}, "error": repr(error)}
        result.internal_state["sage"] = stats

    def around_waiting_tokens(original: Any, self: Any) -> int:
        num_tokens: int = original(self)
        jobs = (req.sage.job for req in self.get_waiting_queue() if hasattr(req, "sage"))
        return num_tokens + answer_tokens(jobs)

    def of_scheduler(name: str, kind: Any, hook: Any, *parameters: str) -> Hook:
        return Hook(f"{_SCHEDULER}.{name}", kind, hook, parameters)

    exports = [Hook(f"{_LOADS}.get_num_waiting_uncached_tokens", AROUND, around_waiting_tokens, ())]
    return [
        *(exports if config.export.predicted_load else ()),
        Hook(
            f"{_POLICY}._validate_and_adjust_policy",
            AROUND,
            around_validate,
            ("policy", "tree_cache"),
        ),
        of_scheduler("init_schedule_policy", AFTER, after_init_policy),
        of_scheduler("init_request_dispatcher", AFTER, after_init_dispatcher),
        of_scheduler("init_req_max_new_tokens", AFTER, after_init_max_new_tokens, "req"),
        of_scheduler("_add_request_to_queue", BEFORE, before_add_to_queue, "req"),
        of_scheduler("handle_generate_request", AFTER, after_generate_request, "recv_req"),
        Hook(f"{_POLICY}.calc_priority", BEFORE, before_calc_priority, ("waiting_queue",)),
        of_scheduler("get_new_batch_prefill", AROUND, around_prefill_pass, "running_batch"),
        of_scheduler("_poll_timeout_aborts", AROUND, around_timeouts),
        of_scheduler("_abort_on_queued_limit", AROUND, around_queue_limit, "recv_req"),
        of_scheduler("flush_cache", AFTER, after_flush_cache),
        of_scheduler("run_batch", AROUND, around_run_batch, "batch"),
        of_scheduler("process_batch_result", AFTER, after_batch_result, "batch", "result"),
        of_scheduler("get_internal_state", AFTER, after_internal_state, "recv_req"),
        Hook(f"{_RUNNER}.init_attention_backends", BEFORE, before_attention_backends, ()),
        Hook(
            "sglang.srt.layers.logits_processor.LogitsProcessor._get_pruned_states",
            AROUND,
            around_pruned_states,
            ("aux_hidden_states",),
        ),
        Hook(f"{_UPDATER}.flush_cache_after_weight_update", AFTER, after_weights, ()),
        Hook(f"{_POLICY}.shortest_prefill_chunk_limit", AROUND, around_chunk_limit, ()),
        Hook(f"{_BATCH}._get_decode_retraction_order", AROUND, around_retraction_order, ("reqs",)),
        Hook(f"{_ADDER}.__init__", AFTER, after_adder_init, ("running_batch", "new_token_ratio")),
        Hook(f"{_ADDER}.add_one_req", AROUND, around_add_one, ("req",)),
        Hook(
            f"{_ADDER}._select_prefill_admission",
            AROUND,
            around_select_admission,
            ("req", "has_chunked_req"),
        ),
    ]


def _ticked(scheduler: Scheduler, tick: Tick) -> None:
    scheduler.sage.jobs.ticked(tick.now_s)


def _scored(scheduler: Scheduler, scores: Scores) -> None:
    scheduler.sage.scored(scores)


def _told(config: SageConfig, scheduler: Scheduler, news: StepTimes) -> StepTimes | None:
    """What is returned SGLang sends to the HTTP process."""
    scheduler.sage.told(news)
    return news if dispatches(scheduler.server_args, config) else None
