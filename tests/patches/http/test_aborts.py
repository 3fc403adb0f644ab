"""Early aborts, as an HTTP process sends them to schedulers."""

from __future__ import annotations

import pytest

from patches.carrier import short_id
from tests.patches.http.conftest import Manager, generate


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
