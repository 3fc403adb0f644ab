"""Aborts that overtake their requests, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from patches.carrier import decode_asked, encode_asked, short_id, strip
from patches.http.hooks import tell_early_abort as tell
from patches.messages import EarlyAbort
from patches.scheduler import early_aborts
from patches.scheduler.early_aborts import EarlyAborts


def come(aborts: EarlyAborts, custom_params: Any, rid: str = "its own") -> list[str]:
    """The ids that are aborted as a request comes."""
    aborted: list[str] = []
    scheduler: Any = SimpleNamespace(abort_request=lambda message: aborted.append(message.rid))
    sampling = SimpleNamespace(custom_params=custom_params)
    request: Any = SimpleNamespace(rid=rid, sampling_params=sampling)
    aborts.after(scheduler, request)
    return aborted


@pytest.mark.parametrize(
    ("asked", "is_given_up"),
    [
        (("a", 9.0, 9.1), True),
        (("c" * 10**6, 9.0, 9.1), True),
        (("c" * (10**6 - 1), 9.0, 9.1), False),
        (("a-1", 9.0, 9.1), True),  # as SGLang aborts
        (("b", 9.0, 9.1), False),
        (("a", 10.5, 10.6), False),  # a later one of that id
        (("a", 9.0, 10.5), True),  # it waited for its turn in its own process
        (("z", 4.0, 4.1), True),  # all were given up at 5
        (("z", 4.0, 5.5), False),  # but not those that a pause held back
        (("z", 5.5, 5.6), False),
    ],
)
def test_who_was_given_up_goes_and_nobody_else(
    asked: tuple[str, float, float], is_given_up: bool
) -> None:
    aborts = EarlyAborts()
    aborts.add(EarlyAbort(begins="", sent_s=5.0))
    aborts.add(EarlyAbort(begins="a", sent_s=10.0))
    aborts.add(EarlyAbort(begins=short_id("c" * 10**6), sent_s=10.0))
    assert come(aborts, encode_asked(*asked)) == (["its own"] if is_given_up else [])


@pytest.mark.parametrize(
    "custom_params", [None, {}, {"other": 1}, *({"__sage_asked": v} for v in (5, [], ["a", 1, 2]))]
)
def test_of_a_request_that_says_nothing_nothing_is_known(custom_params: Any) -> None:
    aborts = EarlyAborts()
    aborts.add(EarlyAbort(begins="", sent_s=5.0))
    assert come(aborts, custom_params) == []


def test_the_latest_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_aborts, "_MOST", 3)
    aborts = EarlyAborts()
    for number, name in enumerate("abcda"):
        aborts.add(EarlyAbort(begins=name, sent_s=float(number)))
    known = [name for name in "abcd" if come(aborts, encode_asked(name, 0.0, 0.0))]
    assert known == ["a", "c", "d"]
    aborts.add(EarlyAbort(begins="e", sent_s=603.5))
    assert [name for name in "acde" if come(aborts, encode_asked(name, 0.0, 0.0))] == ["a", "e"]
    # Requests forget them too.
    assert come(aborts, encode_asked("z", 1300.0, 1300.0)) == []
    assert len(aborts) == 0


@pytest.mark.parametrize(
    ("rid", "abort_all", "num_processes", "told"),
    [
        ("awaited", False, 1, "awaited"),
        ("sent", False, 1, None),
        ("sent", False, 2, None),
        ("nobody", False, 1, None),
        ("nobody", False, 2, "nobody"),  # another process may have it
        ("x" * 10**6, False, 2, short_id("x" * 10**6)),  # no client says how long
        ("", False, 2, None),
        ("", True, 1, ""),
        ("awaited", True, 2, ""),
    ],
)
def test_schedulers_hear_of_what_may_be_too_early(
    rid: str, abort_all: bool, num_processes: int, told: str | None
) -> None:
    heard: list[EarlyAbort] = []
    manager: Any = SimpleNamespace(
        rid_to_state={
            "awaited": SimpleNamespace(dispatched=False),
            "sent": SimpleNamespace(dispatched=True),
        },
        server_args=SimpleNamespace(tokenizer_worker_num=num_processes),
        _dispatch_to_scheduler=heard.append,
    )
    tell(manager, rid, abort_all)
    assert all(len(message.begins) < 200 for message in heard)
    assert [message.begins for message in heard] == ([] if told is None else [told])


def test_the_message_crosses_processes_and_no_client_says_when_it_came() -> None:
    message = EarlyAbort(begins="a", sent_s=2.5)
    assert msgpack_decode(msgpack_encode(message)) == message
    assert strip(encode_asked("a", 1.0, 2.0)) == {}
    assert decode_asked(encode_asked("a", 1.0, 2.0)) == ("a", 1.0, 2.0)
