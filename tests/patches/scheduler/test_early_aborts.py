from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.carrier import encode_asked, short_id
from patches.messages import EarlyAbort
from patches.scheduler import early_aborts
from patches.scheduler.early_aborts import EarlyAborts


def is_aborted(aborts: EarlyAborts, custom_params: Any) -> bool:
    """Whether a request is aborted as it comes."""
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


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, False),
        (("a", 9.0, 9.1), True),
        (("c" * 10**6, 9.0, 9.1), True),
        (("c" * (10**6 - 1), 9.0, 9.1), False),
        (("a-1", 9.0, 9.1), True),  # as SGLang aborts
        (("b", 9.0, 9.1), False),
        (("a", 10.5, 10.6), False),  # a later one of that id
        (("a", 9.0, 10.5), True),  # it waited for its turn in its own process
        (("z", 4.0, 4.1), True),  # all were given up at 5
        (("z", 4.0, 5.5), False),  # requests that a pause held back stay
        (("z", 5.5, 5.6), False),
    ],
)
def test_only_given_up_requests_are_aborted(asked: Any, expected: bool) -> None:
    aborts = of(("", 5.0), ("a", 10.0), (short_id("c" * 10**6), 10.0))
    assert is_aborted(aborts, encode_asked(*asked) if asked else None) is expected


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


def test_long_ids_are_kept_short() -> None:
    begun, other = short_id("c" * 10**6), short_id("c" * 10**6 + "d")
    assert max(len(begun), len(other)) < 200
    assert begun != other
