"""Which replica of a server with --dp-size above 1 serves a request: our router in its one HTTP
process, which sees every request come, grow and end."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from patches.http_types import TokenizedRequest
from patches.messages import StepTimes
from sage_sched.config import SageConfig, StepTimeConfig, in_ms
from sage_sched.distribution import LengthDistribution
from sage_sched.job import NO_HINTS, Hints
from sage_sched.routing.ledger import Ledger, Newcomer
from sage_sched.routing.prefix_index import block_keys
from sage_sched.routing.router import Router
from sage_sched.routing.routers import router_named
from sage_sched.steps.time import ServerFacts, StepTime

logger = logging.getLogger(__name__)

# What a scheduler has by default where none has said so yet.
_POOL_TOKENS, _MOST_RUNNING = 100_000, 256


class Load(Protocol):
    """LoadSnapshot, managers/load_snapshot.py"""

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    max_total_num_tokens: int
    max_running_requests: int


class LoadReader(Protocol):
    """TokenizerManager.load_snapshot_reader"""

    def read_all(self) -> Sequence[Load]: ...


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What is known of a request when it is sent."""

    distribution: LengthDistribution | None = None
    hints: Hints = NO_HINTS


class Dispatch:
    """One server's. What it cannot decide it leaves to SGLang."""

    def __init__(self, num_ranks: int, config: SageConfig, loads: LoadReader) -> None:
        self._name = config.router.dispatch
        self._router: Router = router_named(self._name)
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

    def send(
        self,
        request: TokenizedRequest,
        given: int | None,
        foreseen: Foreseen,
        alive: Collection[str],
    ) -> bool:
        """A request is about to be sent: to the rank that its client has given, or that is picked
        here. False if that replica has died. Never raises. alive: the ids of all unfinished
        requests."""
        if given is not None and given not in self._alive:
            return False
        try:
            self._forget_all_but(alive)
            self._send(request, given, foreseen)
        except Exception:
            if not self._num_failed:
                logger.exception("no replica could be picked: SGLang chooses one")
            self._num_failed += 1
        return True

    def _send(self, request: TokenizedRequest, given: int | None, foreseen: Foreseen) -> None:
        ledger, now_s = self._started(), time.monotonic()
        token_ids = request.input_ids
        if not isinstance(token_ids, list | array):
            return  # embeddings: nothing says how many
        # What is not shared with others must not look as if it were.
        scope = (request.lora_id, request.extra_key, request.cache_salt)
        cap_tokens = request.sampling_params.max_new_tokens
        newcomer = Newcomer(
            len(token_ids),
            _POOL_TOKENS if cap_tokens is None else max(1, cap_tokens),
            foreseen.distribution,
            block_keys(token_ids, scope),
            foreseen.hints,
        )
        if given is None:
            self._read_loads(ledger, now_s)
            view = ledger.view(newcomer, now_s).among(self._alive)
            rank = self._alive[self._router.pick(view)]
            request.routed_dp_rank = rank
            self._num_picked[rank] += 1
        else:
            rank = given
            self._num_given += 1
        ledger.sent(request.rid, rank, newcomer, now_s)
        self._rank_of[request.rid] = rank

    def heard(self, told: Iterable[tuple[str, int, bool]]) -> None:
        """Of requests: id, how many tokens their answers have, and whether they have ended."""
        if self._ledger is None:
            return
        now_s = time.monotonic()
        for rid, age_tokens, has_ended in told:
            rank = self._rank_of.get(rid)
            if rank is None:
                continue
            if has_ended:
                self._ledger.ended(rid, rank, now_s)
                del self._rank_of[rid]
            else:
                self._ledger.grown(rid, rank, age_tokens, now_s)

    def told(self, news: StepTimes) -> None:
        """A replica says how long its steps take. All are of one kind, so the latest word counts
        for all."""
        self._step_time, self._source = StepTime(*news.seconds), news.source
        if self._ledger is not None:
            self._ledger.go_by(self._step_time)

    def died(self, rank: int) -> list[str]:
        """A replica is there no more. The ids of the requests that were on it."""
        if rank in self._alive:
            self._alive.remove(rank)
        lost = [rid for rid, at in self._rank_of.items() if at == rank]
        self.heard((rid, 0, True) for rid in lost)
        return lost

    def stats(self) -> dict[str, Any]:
        """For /server_info. num_picked: by rank. num_given: of requests whose clients have chosen.
        num_unfinished, num_waiting: by rank, as far as was known at the last pick; without a first
        token. num_failed: left to SGLang, after an error. dead: the ranks that have died.
        step_time: by which it goes, and where that is from (patches.scheduler.calibration)."""
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

    def _read_loads(self, ledger: Ledger, now_s: float) -> None:
        """Of an answer that is not streamed nothing is heard before its 50th token, so that it
        would count as waiting until then: what replicas say of themselves is more."""
        for load in self._loads.read_all():
            # Read again, it would count those that have ended since.
            if load.timestamp != self._told_s[load.dp_rank]:
                self._told_s[load.dp_rank] = load.timestamp
                ledger.running(load.dp_rank, load.num_running_reqs, now_s)

    def _started(self) -> Ledger:
        if self._ledger is None:
            loads = self._loads.read_all()
            pool_tokens = max((load.max_total_num_tokens for load in loads), default=0)
            most_running = max((load.max_running_requests for load in loads), default=0)
            server = ServerFacts(
                pool_tokens or _POOL_TOKENS, most_running or _MOST_RUNNING, self._step_time, 0.0
            )
            self._ledger = Ledger(self._num_ranks, server)
        return self._ledger

    def _forget_all_but(self, alive: Collection[str]) -> None:
        """An abort may end a request without a word of its scheduler's. alive has the one that is
        about to be sent."""
        if self._ledger is not None and len(self._rank_of) >= len(alive):
            gone = [rid for rid in self._rank_of if rid not in alive]
            self.heard((rid, 0, True) for rid in gone)
