"""What the documentation shows can be run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sage_sched.queue import ranked_order

from sage_sched import policy as registry
from sage_sched.config import PolicyConfig
from sage_sched.job import Job
from sage_sched.policy import policy_named, policy_names
from tests.sage_sched.strategies import SERVER

POLICIES_MD = (Path(__file__).parents[1] / "docs" / "policies.md").read_text(encoding="utf-8")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the page's own policy, registered for one test."""
    (code,) = re.findall(r"```python\n(.*?)```", POLICIES_MD, re.S)
    assert len(code.splitlines()) < 30
    policy_names()
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    namespace: dict[str, Any] = {}
    exec(compile(code, "docs/policies.md", "exec"), namespace)
    return "patient"


def test_the_example_policy_orders_a_queue(example: str) -> None:
    policy = policy_named(example)(PolicyConfig(), SERVER)
    jobs = [
        Job(arrival=i, input_tokens=n, max_new_tokens=99, distribution=None,
            served_at_arrival_tokens=i)
        for i, n in enumerate((500, 20))
    ]  # fmt: skip
    assert all(policy.admit(job) for job in jobs)
    assert ranked_order(jobs, policy, served_tokens=10) == [1, 0]
    assert ranked_order(jobs, policy, served_tokens=SERVER.kv_pool_tokens + 1) == [0, 1]


def test_every_policy_is_in_the_table() -> None:
    listed = set(re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\| `.*?\|", POLICIES_MD, re.M))))
    assert listed == set(policy_names())
