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
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_what_is_given_changes_and_all_else_stays() -> None:
    changed = START.changed(
        {
            "schedule_policy": "ssjf",
            "policy": {"sage": {"regret": 4}},
            "preemption": {"enabled": False, "host_pool_gib": 7},
        }
    )
    assert changed.schedule_policy == "ssjf"
    assert changed.config.policy["sage"].regret == 4.0
    assert changed.config.policy["sage"].ttft_ms == 2000.0
    assert (changed.config.preemption.enabled, changed.config.preemption.host_pool_gib) == (
        False,
        7,
    )
    again = changed.changed({"policy": {"sage": {"ttft_ms": 500}}})
    assert again.config.policy["sage"].regret == 4.0
    assert START.changed({}) == START


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schedule_policy": "nobody"}, "schedule_policy is 'nobody', allowed: "),
        ({"schedule_policy": 1}, "schedule_policy is 1, allowed: "),
        ({"schedule_policy": "priority"}, "allowed: "),
        ({"schedule_policy": "srpt-oracle"}, "schedule_policy is 'srpt-oracle', allowed: "),
        (
            {"policy": {"sage": {"regret": -1.0}}},
            "policy.sage.regret is -1.0, allowed: a number from 0 to ",
        ),
        ({"policy": {"sage": {"regret": "much"}}}, "policy.sage.regret is 'much'"),
        ({"policy": {"sage": {"regrets": 1.0}}}, "unknown field of section policy.sage 'regrets'"),
        ({"policy": {"proserve-expected": {"eta": 1.0}}}, "of which it is a variant"),
        ({"policy": 3}, "policy is 3"),
        ({"preemption": True}, "section preemption is True"),
        (
            {"preemption": {"host_pool_gib": -1}},
            "preemption.host_pool_gib is -1, allowed: a number ",
        ),
        ({"speed": 9}, "unknown section 'speed'"),
        ({"step_time": {"decode_base_ms": 1.0}}, "step_time cannot change while the server runs"),
        ({"probe": {"file": "x"}}, "probe cannot change while the server runs: it was put into"),
        ({"slo": {}}, "slo cannot change while the server runs"),
        (["schedule_policy"], "allowed: names with values"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        START.changed(changes)
    assert why in str(refusal.value)


def test_only_what_a_server_takes_is_said_to_be_allowed() -> None:
    with pytest.raises(ConfigError) as refusal:
        START.changed({"schedule_policy": "nobody"})
    for name in str(refusal.value).partition("allowed: ")[2].split(", "):
        assert START.changed({"schedule_policy": name}).schedule_policy == name


@given(_JSON)
def test_nonsense_is_refused_and_never_worse(changes: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert START.changed(changes) == START


def test_of_each_section_it_is_said_why_it_cannot_change_if_it_cannot() -> None:
    sections = {*SageConfig().sections(), "step_time"}
    settings = Settings("sage", SageConfig())
    for section in sections - {"policy", "preemption", "decode"}:
        with pytest.raises(ConfigError, match=f"^{section} cannot change while the server runs: "):
            settings.changed({section: {}})


@pytest.mark.parametrize("policy", [*policy_names(), *sorted(STOCK_POLICIES)])
def test_what_is_shown_can_be_given_back(policy: str) -> None:
    settings = START.changed({"schedule_policy": policy, "policy": {"sage": {"regret": "inf"}}})
    shown = json.loads(json.dumps(settings.shown(), allow_nan=False))
    assert settings.changed(shown).shown() == settings.shown()
    assert shown["schedule_policy"] == policy
    assert shown["policy"]["sage"]["regret"] == "inf"
