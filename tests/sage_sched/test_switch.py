"""Settings that may change while a server runs, and changes that are refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names
from sage_sched.app.switch import STOCK_POLICIES, Settings
from sage_sched.fields import ConfigError

START = Settings("sage", SageConfig.parse({"preemption": {"host_pool_gib": 7.0}}))
FIXED = {*SageConfig().sections(), "step_time"} - {"policy", "preemption", "decode", "overload"}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_what_is_given_changes_and_all_else_stays() -> None:
    first = {"schedule_policy": "ssjf", "policy": {"sage": {"regret": 4}}}
    changed = START.changed(first | {"preemption": {"enabled": False}})
    changed = changed.changed({"policy": {"sage": {"ttft_ms": 500}}})
    sage, preemption = changed.config.policy["sage"], changed.config.preemption
    assert (changed.schedule_policy, sage.regret, sage.ttft_ms) == ("ssjf", 4.0, 500.0)
    assert (preemption.enabled, preemption.host_pool_gib) == (False, 7)
    assert START.changed({}) == START


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(({"schedule_policy": name}, "schedule_policy")
          for name in ("nobody", 1, "priority", "srpt-oracle")),
        ({"policy": {"sage": {"regret": -1.0}}}, "policy.sage.regret"),
        ({"policy": {"sage": {"regret": "much"}}}, "policy.sage.regret"),
        ({"policy": 3}, "policy"),
        ({"preemption": True}, "preemption"),
        ({"preemption": {"host_pool_gib": -1}}, "preemption.host_pool_gib"),
        ({"speed": 9}, "speed"),
        *(({section: {}}, section) for section in sorted(FIXED)),
        (["schedule_policy"], "schedule_policy"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(changes: Any, named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        START.changed(changes)
    assert named in str(refusal.value)


@given(_JSON)
def test_nonsense_is_refused_and_never_worse(changes: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert START.changed(changes) == START


@pytest.mark.parametrize("policy", [*policy_names(), *sorted(STOCK_POLICIES)])
def test_what_is_shown_can_be_given_back(policy: str) -> None:
    settings = START.changed({"schedule_policy": policy, "policy": {"sage": {"regret": "inf"}}})
    shown = json.loads(json.dumps(settings.shown(), allow_nan=False))
    assert settings.changed(shown).shown() == settings.shown()
    assert shown["schedule_policy"] == policy
    assert shown["policy"]["sage"]["regret"] == "inf"
