"""The HTTP process is told that a replica has died: who waited for it hears of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import AbortReq

from patches.http_types import TokenizerManager


class ActiveRanks(Protocol):
    """ActiveRanksOutput, managers/io_struct.py. status: by rank, whether it is alive."""

    status: Sequence[bool]


def bury(manager: TokenizerManager, ranks: ActiveRanks) -> None:
    """Whatever is on a replica that has died ends with an error; nothing is sent there any more;
    and what is asked of all replicas is answered by those that are left."""
    if manager.sage_dispatch is None:
        return
    for rank, is_alive in enumerate(ranks.status):
        if not is_alive:
            end(manager, manager.sage_dispatch.died(rank), rank)
    num_alive = sum(ranks.status)
    for communicator in _communicators(manager):
        communicator.set_fan_out(num_alive)
        asked = communicator._result_event
        if asked is not None:  # right now
            communicator._result_fan_out = num_alive
            if len(communicator._result_values) >= num_alive:
                asked.set()


def end(manager: TokenizerManager, rids: Iterable[str], rank: int) -> None:
    """Answer these requests with status 503, as SGLang answers what it has to give up."""
    reason = {
        "type": "abort",
        "message": f"Replica {rank} (routed_dp_rank), which was to answer, has died. Ask again.",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "err_type": "ServiceUnavailable",
    }
    for rid in rids:
        manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


def _communicators(manager: TokenizerManager) -> Iterable[FanOutCommunicator[Any]]:
    return [each for each in vars(manager).values() if isinstance(each, FanOutCommunicator)]
