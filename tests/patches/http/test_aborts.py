"""HTTP processes send aborts that overtake their requests, and schedulers keep them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from patches.carrier import encode_asked, short_id
from patches.messages import EarlyAbort
from patches.scheduler import early_aborts
from patches.scheduler.early_aborts import EarlyAborts
from predictor_store.predict.asked import Asked
from predictor_store.service.client import Prediction
from tests.patches.http.conftest import Client, Manager, generate

LONG_ID = "c" * 10**6


def is_aborted(aborts: EarlyAborts, custom_params: Any) -> bool:
    aborted: list[str] = []
    scheduler: Any = SimpleNamespace(abort_request=lambda message: aborted.append(message.rid))
    sampling = SimpleNamespace(custom_params=custom_params)
    request: Any = SimpleNamespace(rid="its own", sampling_params=sampling)
    aborts.after(scheduler, request)
    assert aborted in ([], ["its own"])
    return bool(aborted)


def of(*aborts: tuple[str, float]) -> EarlyAborts:
    found = EarlyAborts()
    for begins, sent_s in aborts:
        found.add(EarlyAbort(begins=begins, sent_s=sent_s))
    return found


def test_only_given_up_requests_are_aborted() -> None:
    # All are given up at 5.
    aborts = of(("", 5.0), ("a", 10.0), (short_id(LONG_ID), 10.0))
    aborted = [
        ("a", 9.0, 9.1), (LONG_ID, 9.0, 9.1), ("z", 4.0, 4.1),
        ("a-1", 9.0, 9.1),  # as SGLang aborts
        ("a", 9.0, 10.5),  # it waited for its turn in its own process
    ]  # fmt: skip
    spared = [
        (LONG_ID[1:], 9.0, 9.1), ("b", 9.0, 9.1), ("z", 5.5, 5.6),
        ("a", 10.5, 10.6),  # a later one of that id
        ("z", 4.0, 5.5),  # a pause held it back
    ]  # fmt: skip
    assert [each for each in aborted if not is_aborted(aborts, encode_asked(*each))] == []
    assert [each for each in spared if is_aborted(aborts, encode_asked(*each))] == []
    assert not is_aborted(aborts, None)


def test_the_latest_aborts_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_aborts, "_MOST", 3)
    aborts = of(*((name, float(number)) for number, name in enumerate("abcda")))

    def known(names: str) -> str:
        return "".join(n for n in names if is_aborted(aborts, encode_asked(n, 0.0, 0.0)))

    assert known("abcd") == "acd"
    aborts.add(EarlyAbort(begins="e", sent_s=603.5))
    assert known("acde") == "ae"
    # Requests expire them too.
    assert not is_aborted(aborts, encode_asked("z", 1300.0, 1300.0))
    assert len(aborts) == 0


@pytest.mark.parametrize(
    ("rid", "abort_all", "num_processes", "expected"),
    [
        ("awaited", False, 1, "awaited"),
        ("sent", False, 1, None),
        ("sent", False, 2, None),
        ("unknown", False, 1, None),
        ("unknown", False, 2, "unknown"),  # another process may have it
        (LONG_ID, False, 2, short_id(LONG_ID)),  # clients choose how long ids are
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
    assert [message.begins for message in manager.sent] == ([] if expected is None else [expected])
    assert all(len(message.begins) < 200 for message in manager.sent)


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
    batch, aborts = manager.receive(generate(["a", "b", "c"])), EarlyAborts()  # type: ignore[arg-type]
    for message in manager.sent:
        aborts.add(msgpack_decode(msgpack_encode(message)))
    aborted = [is_aborted(aborts, tokenized.sampling_params.custom_params) for tokenized in batch]
    assert aborted == [not while_held_back] * 3
