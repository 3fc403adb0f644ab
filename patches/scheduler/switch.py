"""Other settings while a server runs: how they travel to all ranks, and what becomes of them."""

from __future__ import annotations

import json
import logging

from sglang.srt.utils.rank_consensus_checker import rank_consensus

from patches.engine_types import Req, Scheduler
from patches.messages import SetSettings, SettingsNow
from patches.probe.scores import why_no_probe
from patches.scheduler.slices import why_not_cut
from patches.scheduler.stock_order import go_by_stock_order, stock_order_of
from sage_sched.fields import ConfigError, require

logger = logging.getLogger(__name__)


def switch(scheduler: Scheduler, message: SetSettings) -> SettingsNow:
    """On all ranks. What one refuses all do: it rests on what they share. Never raises: whatever
    is asked of it, a scheduler goes on."""
    refusal = ""
    try:
        changes = json.loads(message.changes)
        if changes is not None:
            _switch(scheduler, changes, message.now_s)
    except ConfigError as error:
        refusal = str(error)
    except Exception as error:
        logger.exception("settings could not be changed")
        refusal = f"the change failed: {error!r}"
    # What somebody else's policy says may hold what no message can.
    refusal = refusal.encode(errors="backslashreplace").decode()
    return SettingsNow(settings=json.dumps(scheduler.sage.settings.shown()), refusal=refusal)


def _switch(scheduler: Scheduler, changes: object, now_s: float) -> None:
    """Raises ConfigError; then all is as it was."""
    state = scheduler.sage
    settings = state.settings.changed(changes)
    name = settings.schedule_policy
    try:
        policy = state.policy_of(settings)
        stock_order = stock_order_of(scheduler, name)
    except Exception as error:  # somebody else's policy, or one by which SGLang cannot go here
        raise ConfigError(f"schedule_policy {name} cannot be set up: {error}") from error
    reason = why_no_probe(policy, state.probing)
    require(not reason, "schedule_policy", name, f"none that needs a probe, as {reason}")
    uncut = why_not_cut(policy, state.slices)
    require(not uncut, "policy.qllm.slice_ms", "above 0", f"0, as {uncut}")
    state.go_by(settings, policy, _unfinished(scheduler), now_s)
    go_by_stock_order(scheduler, name, stock_order)
    # Whoever has room by the new order gets in at the next pass.
    scheduler.running_batch.batch_is_full = False
    _switched(name, json.dumps(settings.shown()))


@rank_consensus(same_params=True)  # type: ignore[untyped-decorator]
def _switched(schedule_policy: str, settings: str) -> None:
    """For SGLang's own check that ranks go on alike (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER)."""
    logger.info("scheduled by %s now: %s", schedule_policy, settings)


def _unfinished(scheduler: Scheduler) -> list[Req]:
    """All requests that have come and are not done, in no particular order: those that wait, wait
    for their grammar, are being prefilled or run. The same on all ranks."""
    batches = [batch for batch in scheduler._collect_inflight_batches() if batch is not None]
    found = [
        *scheduler.waiting_queue,
        *scheduler.grammar_manager.grammar_queue,
        *([] if scheduler.chunked_req is None else [scheduler.chunked_req]),
        *(req for batch in batches for req in batch.reqs),
    ]
    return list({id(req): req for req in found if not req.finished()}.values())
