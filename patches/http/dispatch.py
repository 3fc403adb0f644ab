"""Which replica of a server with --dp-size above 1 serves a request.

Our router runs in the server's one HTTP process, which sees every request come, grow and end.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import AbortReq, ActiveRanksOutput
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput as Tokenized
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from patches.carrier import decode, decode_hints
from patches.messages import StepTimes
from sage_sched.app.config import SageConfig, StepTimeConfig, in_ms
from sage_sched.routing import ROUTERS, Ledger, Newcomer, Router, block_keys
from sage_sched.steps import ServerFacts, StepTime

logger = logging.getLogger(__name__)

# Assumed until a scheduler has reported its own.
_POOL_TOKENS, _MOST_RUNNING = 100_000, 256


class Dispatch:
    """The router of one server. What it cannot decide it leaves to SGLang."""

    def __init__(self, num_ranks: int, config: SageConfig, loads: Any) -> None:
        """loads: TokenizerManager.load_snapshot_reader, which reads all replicas' snapshots."""
        self._name = config.router.dispatch
        self._router: Router = ROUTERS[self._name]()
        self._num_ranks = num_ranks
        self._step_time = (config.step_time or StepTimeConfig()).step_time()
        self._source = "shipped" if config.step_time is None else "configured"
        self._loads = loads
        self._ledger: Ledger | None = None
        self._rank_of: dict[str, int] = {}
        self._alive = list(range(num_ranks))
        self._told_s = [0.0] * num_ranks
        self._num_picked = [0] * num_ranks
        self._num_given = self._num_failed = 0

    def send(self, request: Tokenized, given: int | None, alive: Collection[str]) -> bool:
        """A request is about to be sent: pick its rank, unless its client has given one. False if
        the given replica has died. Never raises. alive: the ids of all unfinished requests, this
        one's too."""
        if given is not None and given not in self._alive:
            return False
        try:
            if len(self._rank_of) >= len(alive):
                # An abort may end a request without a report from its scheduler.
                gone = [rid for rid in self._rank_of if rid not in alive]
                self.heard((rid, 0, True) for rid in gone)
            self._send(request, given)
        except Exception:
            if not self._num_failed:
                logger.exception("no replica could be picked: SGLang chooses one")
            self._num_failed += 1
        return True

    def _send(self, request: Tokenized, given: int | None) -> None:
        ledger, now_s = self._started(), time.monotonic()
        token_ids = request.input_ids
        if not isinstance(token_ids, list | array):
            return  # embeddings: their number is unknown
        # Requests of different scopes share no prefix.
        scope = (request.lora_id, request.extra_key, request.cache_salt)
        cap_tokens = request.sampling_params.max_new_tokens
        carried = request.sampling_params.custom_params
        newcomer = Newcomer(
            len(token_ids),
            _POOL_TOKENS if cap_tokens is None else max(1, cap_tokens),
            decode(carried),
            block_keys(token_ids, scope),
            decode_hints(carried),
        )
        if given is None:
            # Correct who still waits by the replicas' own reports: of an answer that is not
            # streamed, nothing is heard here before its 50th token. Reading a report twice would
            # count requests that have ended since.
            for load in self._loads.read_all():
                if load.timestamp != self._told_s[load.dp_rank]:
                    self._told_s[load.dp_rank] = load.timestamp
                    ledger.running(load.dp_rank, load.num_running_reqs, now_s)
            view = ledger.view(newcomer, now_s).among(self._alive)
            rank = self._alive[self._router.pick(view)]
            request.routed_dp_rank = rank
            self._num_picked[rank] += 1
        else:
            rank = given
            self._num_given += 1
        ledger.sent(request.rid, rank, newcomer, now_s)
        self._rank_of[request.rid] = rank

    def heard(self, reports: Iterable[tuple[str, int, bool]]) -> None:
        """Reports of requests: id, tokens of the answer so far, whether it has ended."""
        if self._ledger is None:
            return
        now_s = time.monotonic()
        for rid, age_tokens, has_ended in reports:
            rank = self._rank_of.get(rid)
            if rank is None:
                continue
            if has_ended:
                self._ledger.ended(rid, rank, now_s)
                del self._rank_of[rid]
            else:
                self._ledger.grown(rid, rank, age_tokens, now_s)

    def updated(self, update: StepTimes) -> None:
        """A replica reports its step times. All are of one kind, so the latest count for all."""
        self._step_time, self._source = StepTime(*update.seconds), update.source
        if self._ledger is not None:
            self._ledger.go_by(self._step_time)

    def died(self, rank: int) -> list[str]:
        """A replica has died: the ids of the requests that were on it."""
        if rank in self._alive:
            self._alive.remove(rank)
        lost = [rid for rid, at in self._rank_of.items() if at == rank]
        self.heard((rid, 0, True) for rid in lost)
        return lost

    def stats(self) -> dict[str, Any]:
        """For /server_info. num_picked: requests placed, by rank. num_given: requests placed by
        their clients. num_unfinished, num_waiting (no token yet): by rank, as known at the last
        pick. num_failed: requests left to SGLang after an error. dead: the ranks that have died.
        step_time: what it uses, and its source (patches.scheduler.calibration)."""
        return {
            "dispatch": self._name,
            "num_picked": self._num_picked,
            "num_given": self._num_given,
            "num_unfinished": self._ledger.num_unfinished() if self._ledger else [],
            "num_waiting": self._ledger.num_waiting() if self._ledger else [],
            "num_failed": self._num_failed,
            "dead": [rank for rank in range(self._num_ranks) if rank not in self._alive],
            "step_time": {"source": self._source, **in_ms(self._step_time)},
        }

    def _started(self) -> Ledger:
        if self._ledger is None:
            loads = self._loads.read_all()
            pool_tokens = max((load.max_total_num_tokens for load in loads), default=0)
            most_running = max((load.max_running_requests for load in loads), default=0)
            facts = (pool_tokens or _POOL_TOKENS, most_running or _MOST_RUNNING)
            self._ledger = Ledger(self._num_ranks, ServerFacts(*facts, self._step_time, 0.0))
        return self._ledger


def bury(manager: TokenizerManager, ranks: ActiveRanksOutput) -> None:
    """After a replica has died, its requests end with an error, nothing is sent there any more,
    and questions to all replicas are answered by those that are left."""
    dispatch: Dispatch | None = manager.sage.dispatch
    if dispatch is None:
        return
    for rank, is_alive in enumerate(ranks.status):
        if not is_alive:
            end(manager, dispatch.died(rank), rank)
    num_alive = sum(ranks.status)
    for communicator in (*vars(manager).values(), manager.sage.settings):
        if isinstance(communicator, FanOutCommunicator):
            communicator.set_fan_out(num_alive)
            asked = communicator._result_event
            if asked is not None:  # a question is open
                communicator._result_fan_out = num_alive
                if len(communicator._result_values) >= num_alive:
                    asked.set()


def end(manager: TokenizerManager, rids: Iterable[str], rank: int) -> None:
    """Answer these requests with status 503, as SGLang answers requests that it gives up."""
    reason = {
        "type": "abort",
        "message": f"Replica {rank} (routed_dp_rank), which was to answer, has died. Ask again.",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "err_type": "ServiceUnavailable",
    }
    for rid in rids:
        manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))
