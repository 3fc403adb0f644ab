"""The hooks of a scheduler process, grouped by purpose."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, CacheAgnosticPolicy
from sglang.utils import TypeBasedDispatcher

from patches import carrier
from patches.engine_types import Batch, Req, Scheduler
from patches.hook import AFTER, AROUND, BEFORE, Hooks
from patches.messages import EarlyAbort, Scores, SetSettings, StepTimes, Tick
from patches.probe.scores import Probing
from patches.probe.setup import install_tap
from patches.refusals import refuse_model
from patches.scheduler.admission import add, correct
from patches.scheduler.decode_pass import order_arrived, run_decode_pass
from patches.scheduler.executor import run_pass
from patches.scheduler.hidden import timed_out, without_started
from patches.scheduler.penalties import count_again
from patches.scheduler.state import SchedulerState
from patches.scheduler.switch import switch
from patches.scheduler.view import is_swapped
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names

logger = logging.getLogger(__name__)

_MANAGERS = "sglang.srt.managers"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_POLICY = f"{_MANAGERS}.schedule_policy.SchedulePolicy"
_ADDER = f"{_MANAGERS}.schedule_policy.PrefillAdder"
_BATCH = f"{_MANAGERS}.schedule_batch.ScheduleBatch"
_COMPONENTS = f"{_MANAGERS}.scheduler_components"
_PREALLOC = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


class _Process:
    """State for hooks that get no scheduler argument. state: set once the scheduler has its
    policy."""

    state: SchedulerState

    def __init__(self, config: SageConfig) -> None:
        self.config = config

    def probing(self) -> Probing | None:
        """Return the probe, or None. The model's first step asks before there is a scheduler."""
        return self.state.probing if hasattr(self, "state") else None


def scheduler_hooks(config: SageConfig) -> Hooks:
    """Return the hooks for one scheduler process whose --schedule-policy is ours."""
    hooks, process = Hooks(), _Process(config)
    _setup(hooks, process)
    _arrivals(hooks)
    _passes(hooks, process)
    _admission(hooks, process)
    _steps(hooks, process)
    if config.probe.is_on:
        _states(hooks, process)
    _apart(hooks, process)
    return hooks


def _setup(hooks: Hooks, process: _Process) -> None:
    """Hook the policy's set-up and the dispatch of our messages."""

    @hooks.at(f"{_POLICY}._validate_and_adjust_policy", AROUND, "policy", "tree_cache")
    def around_validate(original: Any, self: object, policy: str, tree_cache: Any) -> Any:
        # SGLang's enum cannot gain members. Under FCFS its code leaves the order as it is, and
        # still does the rest (prefix matches for load snapshots, eviction order).
        if policy in policy_names():
            return CacheAgnosticPolicy.FCFS
        return original(self, policy, tree_cache)

    @hooks.at(f"{_SCHEDULER}.init_schedule_policy", AFTER)
    def after_init_policy(result: None, self: Scheduler) -> None:
        refuse_model(self.model_config)
        process.state = SchedulerState(self, process.config)

    @hooks.at(f"{_SCHEDULER}.init_request_dispatcher", AFTER)
    def after_init_dispatcher(result: None, self: Scheduler) -> None:
        takers = [
            (Tick, lambda tick: self.sage.ticked(tick.now_s, tick.clock)),
            (StepTimes, lambda update: self.sage.updated(update)),
            (Scores, lambda scores: self.sage.probing.scored(scores)),
            (SetSettings, partial(switch, self)),
            (EarlyAbort, lambda abort: self.sage.early_aborts.add(abort)),
        ]
        self._request_dispatcher += TypeBasedDispatcher(takers)

    @hooks.at(f"{_SCHEDULER}._poll_timeout_aborts", AROUND)
    def around_timeouts(original: Any, self: Scheduler) -> Any:
        # Runs on the entry rank only. Its result is broadcast to all ranks.
        return [*timed_out(self, partial(original, self)), *self.sage.listeners.polled()]


def _arrivals(hooks: Hooks) -> None:
    """Give every request a Job."""

    @hooks.at(f"{_SCHEDULER}.init_req_max_new_tokens", AFTER, "req")
    def after_init_max_new_tokens(result: None, self: Scheduler, req: Req) -> None:
        # This is the last place that every new request passes, in order of arrival. From here on
        # its cap is known. Trap: requests that are about to be aborted pass twice.
        if not hasattr(req, "sage"):
            self.sage.listeners.arrived(req)

    @hooks.at(f"{_SCHEDULER}._add_request_to_queue", AROUND, "req")
    def around_add_to_queue(
        original: Any, self: Scheduler, req: Req, *args: Any, **kw: Any
    ) -> None:
        if hasattr(req, "sage"):
            # SGLang may have cut the prompt since it arrived, or replaced it by a stub.
            job = req.sage.job
            job.input_tokens = len(req.origin_input_ids)
            # It may have run, and been retracted, while no plan was made.
            job.grow(len(req.output_ids))
            self.sage.core.last_plan.joins(job)
            ours = self.sage
            turned_away = ours.overload.turns_away(req) or ours.batches.turns_away(req)
            if turned_away or ours.ends_in_pause(req):
                self._release_aborted_request(req)
                return
        original(self, req, *args, **kw)

    @hooks.at(f"{_SCHEDULER}.send_abort_output", BEFORE, "abort_req", "req")
    def before_abort_output(self: Scheduler, abort_req: Any, req: Req) -> None:
        self.sage.overload.turned_away(abort_req, req)

    @hooks.at("sglang.srt.session.session_controller.Session.create_req", AFTER)
    def after_create_turn(req: Req, self: Any, *args: Any, **kw: Any) -> None:
        # SGLang refuses a turn while another one runs. The refused turn must leave its session.
        # Otherwise SGLang would free the session for a third turn when it matches the refused turn
        # with the tree, and two turns would share its KV.
        if self.streaming and req.to_finish is not None:
            req.session = None

    @hooks.at(f"{_SCHEDULER}.handle_generate_request", AFTER, "recv_req")
    def after_generate(_: None, self: Scheduler, recv_req: Any, *args: Any, **kw: Any) -> None:
        self.sage.early_aborts.after(self, recv_req)


def _passes(hooks: Hooks, process: _Process) -> None:
    """Make passes follow the policy's plan, and retractions follow the policy's order."""

    @hooks.at(f"{_SCHEDULER}.get_new_batch_prefill", AROUND, "running_batch")
    def around_prefill_pass(original: Any, self: Scheduler, running_batch: Batch) -> Any:
        return run_pass(self, partial(original, self), running_batch)

    @hooks.at(f"{_POLICY}.calc_priority", BEFORE, "waiting_queue")
    def before_calc_priority(self: object, waiting_queue: list[Req], *args: Any, **kw: Any) -> None:
        if (this := process.state.this_pass) is not None:
            this.hide_unplanned(waiting_queue)

    @hooks.at(f"{_POLICY}.shortest_prefill_chunk_limit", AROUND)
    def around_chunk_limit(original: Any, *args: Any, **kw: Any) -> int | None:
        theirs: int | None = original(*args, **kw)
        this = process.state.this_pass
        limits = (theirs, None if this is None else this.chunk_limit_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    @hooks.at(f"{_BATCH}._get_decode_retraction_order", AROUND, "reqs")
    def around_retraction_order(original: Any, reqs: list[Req]) -> list[int]:
        return process.state.retention_order(reqs, original(reqs))

    @hooks.at(f"{_BATCH}.retract_decode", AFTER)
    def after_retract(result: Any, self: Batch, *args: Any, **kw: Any) -> Any:
        retracted, new_token_ratio, aborted = result
        retracted, lost = process.state.retracted(retracted, aborted)
        return retracted, new_token_ratio, [*aborted, *lost]

    @hooks.at(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        AFTER,
        "batch",
    )
    def after_sampling_info(result: Any, cls: type, batch: Any, *args: Any, **kw: Any) -> None:
        count_again(result, batch)

    @hooks.at(f"{_SCHEDULER}._abort_on_queued_limit", AROUND, "recv_req")
    def around_queue_limit(original: Any, self: Scheduler, recv_req: Req) -> Any:
        if self.max_queued_requests is None:
            return original(self, recv_req)
        return without_started(self, partial(original, self, recv_req))

    @hooks.at(f"{_SCHEDULER}._release_aborted_request", BEFORE, "req")
    def before_release_aborted(self: Scheduler, req: Req) -> None:
        if is_swapped(req) and self.sage.last_preemption is not None:
            self.sage.last_preemption.aborted(req)
        if hasattr(req, "sage"):
            self.sage.end(req, was_aborted=True)

    @hooks.at(f"{_TREE}.checkpoint_into_tree", AFTER, "req")
    def after_checkpoint(_: None, self: object, req: Req, *args: Any, **kw: Any) -> None:
        if hasattr(req, "sage"):
            process.state.session_kv.mark(req, req.sage.job.hints.session)

    @hooks.at(f"{_SCHEDULER}.close_session", AFTER, "recv_req")
    def after_close_session(_: None, self: Scheduler, recv_req: Any) -> None:
        if (sessions := self.sage.core.limits.sessions) is not None:
            sessions.closed(carrier.session_of(str(recv_req.session_id)))

    @hooks.at(f"{_SCHEDULER}.flush_cache", AROUND)
    def around_flush_cache(original: Any, self: Scheduler, *args: Any, **kw: Any) -> bool:
        preemption = self.sage.last_preemption
        if preemption is not None:
            preemption.recall()
        success: bool = original(self, *args, **kw)
        if success and preemption is not None:
            preemption.forget_copies()
        return success

    @hooks.at(
        f"{_COMPONENTS}.invariant_checker.SchedulerInvariantChecker._requests_owning_rows", AROUND
    )
    def around_owning_rows(original: Any, self: object) -> list[Req]:
        preemption = process.state.last_preemption
        return [*original(self), *([] if preemption is None else preemption.returning)]


def _admission(hooks: Hooks, process: _Process) -> None:
    """Keep the plan's headroom free in SGLang's admission."""

    @hooks.at(f"{_ADDER}.__init__", AFTER, "running_batch", "new_token_ratio")
    def after_adder_init(result: None, self: Any, *args: Any, **kw: Any) -> None:
        correct(process.state, self)

    @hooks.at(f"{_ADDER}.add_one_req", AROUND, "req")
    @hooks.at(f"{_ADDER}.add_chunked_req", AROUND, "req")
    def around_add(original: Any, self: object, req: Req, *args: Any, **kw: Any) -> Any:
        return add(process.state, original, self, req, *args, **kw)

    @hooks.at(f"{_ADDER}._select_prefill_admission", AROUND, "req", "has_chunked_req")
    def around_select_admission(original: Any, self: object, req: Req, **kw: Any) -> Any:
        found = original(self, req, **kw)
        if process.state.is_stock:
            return found
        if kw["has_chunked_req"] and getattr(found, "is_chunked", False):
            # SGLang can track only one chunked prompt. It checks for a second one only under its
            # own shortest-prefill-first, which it recognizes by name.
            return AddReqResult.OTHER
        return found


def _steps(hooks: Hooks, process: _Process) -> None:
    """Measure steps, count their tokens, and report."""

    @hooks.at(f"{_SCHEDULER}.run_batch", AROUND, "batch")
    def around_run(original: Any, self: Scheduler, batch: Batch, *args: Any, **kw: Any) -> Any:
        self.sage.listeners.ran(batch)
        run = partial(original, self, batch, *args, **kw)
        return self.sage.calibration.steps.timed(self, batch, run)

    @hooks.at(f"{_SCHEDULER}.process_batch_result", AFTER, "batch", "result")
    def after_step(_: None, self: Scheduler, batch: Batch, result: Any, *args: Any) -> None:
        self.sage.stepped(batch, result)

    @hooks.at(f"{_SCHEDULER}.get_internal_state", AFTER, "recv_req")
    def after_internal_state(result: Any, self: Scheduler, recv_req: object) -> None:
        try:
            stats = self.sage.stats()
        except Exception as error:  # a query must not end the scheduler
            logger.exception("/server_info lacks the counters of sage-sched")
            stats = {"slo": {}, "error": repr(error)}
        result.internal_state["sage"] = stats


def _states(hooks: Hooks, process: _Process) -> None:
    """Read hidden states for a probe, until the model's weights change."""

    @hooks.at(f"{_RUNNER}.init_attention_backends", BEFORE)
    def before_attention_backends(self: Any) -> None:
        # This runs before graphs are captured.
        if not self.is_draft_worker:
            install_tap(self, process.config.probe, process.probing)

    @hooks.at(
        "sglang.srt.layers.logits_processor.LogitsProcessor._get_pruned_states",
        AROUND,
        "aux_hidden_states",
    )
    def around_pruned_states(original: Any, self: Any, *args: Any, **kw: Any) -> Any:
        pruned = original(self, *args, **kw)
        if (tap := getattr(self, "sage_tap", None)) is not None and pruned[2] is not None:
            tap.capture(captured=pruned[2], sample_rows=pruned[3])
        return pruned

    @hooks.at(
        f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
        ".flush_cache_after_weight_update",
        AFTER,
    )
    def after_weights(done: None, self: Any, *args: Any, **kw: Any) -> None:
        if (probing := process.probing()) is not None:
            probing.weights_updated()


def _apart(hooks: Hooks, process: _Process) -> None:
    """Support disaggregation: prefill and decode on separate servers.

    On a prefill server a request ends when the KV of its prompt has been sent. On a decode server a
    pass admits prompts to the KV pool, prefills nothing, and has queues of its own.
    """

    @hooks.at(f"{_SCHEDULER}.process_disagg_prefill_inflight_queue", AFTER)
    def after_sent(done: list[Req], self: Scheduler, *args: Any, **kw: Any) -> None:
        self.sage.end_finished(done)

    @hooks.at(f"{_SCHEDULER}.process_decode_queue", AROUND)
    def around_decode_queue(original: Any, self: Scheduler) -> None:
        run_decode_pass(self, partial(original, self))

    @hooks.at(f"{_PREALLOC}._required_admission_tokens", AROUND, "req")
    def around_needed_tokens(original: Any, self: Any, req: Req, *args: Any, **kw: Any) -> int:
        theirs: int = original(self, req, *args, **kw)
        return process.state.room.needed_tokens(req, theirs, self.max_total_num_tokens)

    @hooks.at(f"{_SCHEDULER}._get_new_prebuilt_batch", BEFORE)
    def before_prebuilt(self: Scheduler, *args: Any, **kw: Any) -> None:
        order_arrived(self)

    @hooks.at(
        f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
        ".process_batch_result_prebuilt",
        AFTER,
        "batch",
    )
    def after_prebuilt(result: None, self: object, batch: Batch) -> None:
        process.state.stepped(batch, None)
