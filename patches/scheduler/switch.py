"""Changes the settings of a running server, on each rank."""

from __future__ import annotations

import json
import logging

from sglang.srt.runtime_context import get_context
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from patches.engine_types import Req, Scheduler
from patches.messages import SetSettings, SettingsNow
from patches.probe.scores import why_no_probe
from patches.scheduler import view
from patches.scheduler.state import SchedulerState
from sage_sched.fields import ConfigError, require

logger = logging.getLogger(__name__)


def switch(scheduler: Scheduler, message: SetSettings) -> SettingsNow:
    """Apply a change of settings, on all ranks. If one rank refuses all do, because a refusal
    depends only on shared state. Never raises, so that no request for a change can end the
    scheduler."""
    refusal = ""
    try:
        changes = json.loads(message.changes)
        if changes is not None:
            _switch(scheduler, changes)
    except ConfigError as error:
        refusal = str(error)
    except Exception as error:
        logger.exception("settings could not be changed")
        refusal = f"the change failed: {error!r}"
    # Another package's policy may return text that no message can carry.
    refusal = refusal.encode(errors="backslashreplace").decode()
    return SettingsNow(settings=json.dumps(scheduler.sage.settings.shown()), refusal=refusal)


def _switch(scheduler: Scheduler, changes: object) -> None:
    """Apply changes. Raises ConfigError, and then nothing has changed."""
    state: SchedulerState = scheduler.sage
    settings = state.settings.changed(changes)
    name = settings.schedule_policy
    try:
        policy = state.policy_of(settings)
        # SGLang's order (managers/schedule_policy.py, SchedulePolicy.policy). Under a policy of
        # ours it is first come, first served, which leaves our order as it is.
        stock_order = scheduler.policy._validate_and_adjust_policy(name, scheduler.tree_cache)
    except Exception as error:  # another package's policy, or a stock one that cannot run here
        raise ConfigError(f"schedule_policy {name} cannot be set up: {error}") from error
    reason = why_no_probe(policy, state.probing)
    require(not reason, "schedule_policy", name, f"a policy without a probe, because {reason}")
    unfinished = sorted(_unfinished(scheduler), key=lambda req: req.sage.job.arrival)
    state.switch(settings, policy, unfinished)
    # SGLang expects its queue in order of arrival, and in places reads the policy's name from its
    # configuration.
    scheduler.policy.policy = stock_order
    scheduler.schedule_policy = name
    _sort_by_arrival(scheduler)
    get_context().override(source="sage-sched", schedule_policy=name)
    # Requests that fit under the new order enter at the next pass.
    scheduler.running_batch.batch_is_full = False
    _switched(name, json.dumps(settings.shown()))
    if settings.is_stock and settings.config.overload.may_refuse:
        logger.warning("[overload] refuses no request under %s, which is SGLang's own", name)


def _sort_by_arrival(scheduler: Scheduler) -> None:
    """Sort by arrival all queues that our plans reorder."""

    def arrival(req: Req) -> int:
        return int(req.sage.job.arrival)

    scheduler.waiting_queue.sort(key=arrival)
    if view.only_decodes(scheduler):
        queue = scheduler.disagg_decode_prealloc_queue
        queue.retracted_queue.sort(key=arrival)
        queue.queue.sort(key=lambda entry: arrival(entry.req))


@rank_consensus(same_params=True)  # type: ignore[untyped-decorator]
def _switched(schedule_policy: str, settings: str) -> None:
    """Let SGLang check that ranks agree (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER)."""
    logger.info("scheduled by %s now: %s", schedule_policy, settings)


def _unfinished(scheduler: Scheduler) -> list[Req]:
    """Return all unfinished requests: they wait, wait for their grammar, are being prefilled, or
    run. All ranks return the same requests."""
    batches = [batch for batch in scheduler._collect_inflight_batches() if batch is not None]
    found = [
        *view.waiting(scheduler),
        *view.held(scheduler),
        *view.unseen(scheduler),
        *scheduler.grammar_manager.grammar_queue,
        *([] if scheduler.chunked_req is None else [scheduler.chunked_req]),
        *(req for batch in batches for req in batch.reqs),
    ]
    return list({id(req): req for req in found if not req.finished()}.values())
