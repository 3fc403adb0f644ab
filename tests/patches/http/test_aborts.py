"""Early aborts, as an HTTP process sends them to schedulers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from patches.carrier import short_id
from patches.scheduler.early_aborts import EarlyAborts
from predictor_store.predict.asked import Asked
from predictor_store.service.client import Prediction
from tests.patches.http.conftest import Client, Manager, generate


@pytest.mark.parametrize(
    ("rid", "abort_all", "num_processes", "expected"),
    [
        ("awaited", False, 1, "awaited"),
        ("sent", False, 1, None),
        ("sent", False, 2, None),
        ("unknown", False, 1, None),
        ("unknown", False, 2, "unknown"),  # another process may have it
        ("x" * 10**6, False, 2, short_id("x" * 10**6)),  # clients choose how long ids are
        ("", False, 2, None),
        ("", True, 1, ""),
        ("awaited", True, 2, ""),
    ],
)
def test_schedulers_hear_of_an_abort_that_may_be_too_early(
    manager: Manager, rid: str, abort_all: bool, num_processes: int, expected: str | None
) -> None:
    for name in ("awaited", "sent"):
        manager.receive(generate(rid=name))
    manager.rid_to_state["sent"].dispatched = True
    manager.server_args.tokenizer_worker_num = num_processes
    manager.abort(rid, abort_all)
    assert all(len(message.begins) < 200 for message in manager.sent)
    assert [message.begins for message in manager.sent] == ([] if expected is None else [expected])


@pytest.mark.parametrize("while_held_back", [True, False])
def test_an_abort_of_all_reaches_a_batch_that_waits_for_its_predictions(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, while_held_back: bool
) -> None:
    """It spares a batch that a pause holds back. SGLang tokenizes a batch one by one: the first
    waits for its prediction before the second's turn has come."""

    async def predict(self: Client, text: str, scope: str, asked: Asked) -> Prediction:
        if not while_held_back:
            manager.abort("", abort_all=True)
        return Prediction(None, self.distribution)

    monkeypatch.setattr(Client, "predict", predict)
    if while_held_back:
        manager.held_back = lambda: manager.abort("", abort_all=True)
    tokenized, aborts, aborted = manager.receive(generate(["a", "b", "c"])), EarlyAborts(), []  # type: ignore[arg-type]
    for message in manager.sent:
        aborts.add(msgpack_decode(msgpack_encode(message)))
    scheduler: Any = SimpleNamespace(abort_request=lambda message: aborted.append(message.rid))
    for number, each in enumerate(tokenized):
        request: Any = SimpleNamespace(rid=number, sampling_params=each.sampling_params)
        aborts.after(scheduler, request)
    assert aborted == ([] if while_held_back else [0, 1, 2])
