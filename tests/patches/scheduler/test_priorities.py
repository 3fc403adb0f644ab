from __future__ import annotations

import pytest

from tests.patches.schedulers import Server, make_request

LEAST = -(2**63)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [5, 0, -1, LEAST, None]),
        ({"schedule_low_priority_values_first": True}, [LEAST, -1, 0, 5, None]),
        ({"enable_priority_scheduling": False}, [0, None, 5, -1, LEAST]),
    ],
)
def test_a_higher_priority_is_a_smaller_level(
    flags: dict[str, bool], expected: list[int | None]
) -> None:
    server = Server(**{"enable_priority_scheduling": True, **flags})
    reqs = [make_request([9]) for _ in range(5)]
    for req, req.priority in zip(reqs, (0, None, 5, -1, LEAST), strict=True):
        server.arrive(req)
    by_level = sorted(reqs, key=lambda req: req.sage.job.level)
    assert [req.priority for req in by_level] == expected
