"""Settings: their values, changes while a server runs, and refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from bench.policies.ltr import LtrParameters
from sage_sched.app.address import Address
from sage_sched.app.config import PreemptionConfig, SageConfig
from sage_sched.app.registry import POLICIES, policy_names
from sage_sched.app.schema import json_schema, leaves
from sage_sched.app.switch import STOCK_POLICIES, Settings
from sage_sched.fields import ConfigError, hints_of, section_in
from sage_sched.policies.sage import SageParameters
from sage_sched.slo import SloClass, SloConfig

SCHEMA = json_schema()
VALID = Draft202012Validator(SCHEMA)
# Anything that a file or POST /sage/settings may contain.
HOSTILE: tuple[Any, ...] = (
    0, -0.0, 5e-324, 1e308, math.inf, -math.inf, math.nan, -1, 2**63, 10**400, -(10**400), True,
    None, "", "inf", "\ud800", "\0", [], {}, [[]], {"\ud800": {}}, {"": 10**400},
)  # fmt: skip
SECTIONS = {
    **{name: section_in(hint) for name, hint in hints_of(SageConfig).items() if section_in(hint)},
    **{f"policy.{name}": policy.Parameters for name, policy in POLICIES.items()},
    "slo.classes.x": SloClass,
}
START = Settings("sage", SageConfig.parse({"preemption": {"host_pool_gib": 7.0}}))
FIXED = {*SageConfig().sections(), "step_time"} - {"policy", "preemption", "decode", "overload"}
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


def nested(path: str, value: object) -> Any:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_sections_override_field_by_field() -> None:
    config = SageConfig.parse({"policy": {"sage": {"regret": 3}}, "store": {"capacity": 5}})
    assert config.policy == {"sage": SageParameters(regret=3.0)}
    assert config.store == dataclasses.replace(SageConfig().store, capacity=5)


def test_settings_survive_printing_and_parsing() -> None:
    policy = {"sage": SageParameters(regret=0.5), "ltr": LtrParameters(7.0)}
    slo = SloConfig(trust="body", default="low", classes={"low": SloClass(tpot_slo_ms=50.0)})
    config = SageConfig(policy=policy, preemption=PreemptionConfig(host_pool_gib=7.0), slo=slo)
    assert SageConfig.parse(config.sections()) == config
    assert SageConfig.parse({}) == SageConfig()


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"polcy": {}}, "polcy"),
        ({"admission": {"quantile": 0.5}}, "admission"),
        ({"decode": {"max_gap_s": 1}}, "max_gap_s"),
        ({"policy": 3}, "policy"),
        ({"policy": {"regret": 2.0}}, "policy.regret"),
        ({"policy": {"sage": 2.0}}, "policy.sage"),
        ({"policy": {"sage": {"regrets": 3}}}, "regrets"),
        ({"policy": {"ssjf": {"x": 1.0}}}, "policy.ssjf"),
        ({"policy": {"proserve-expected": {"eta": 1.0}}}, "variant"),
        ({"slo": {"default": "x"}}, "slo.default"),
        ({"predictor": {"service": "nowhere"}}, "predictor.service: 'nowhere' is no address"),
        ({"slo": {"classes": 3}}, "slo.classes"),
        ({"slo": {"classes": {"x": {"tpot_slo_ms": 50, "min_tpot_slo_ms": 51}}}},
         "slo.classes.x.min_tpot_slo_ms"),
        ({"slo": {"default": "x", "classes": {"x": {"max_share": 0.5}}}},
         "slo.classes.x.max_share"),
        ({"slo": {"classes": {"x": {}, "y": {"priority": 0}}}}, "slo.classes.y.priority"),
        ({"step_time": {"decode_base_ms": 0, "decode_kv_token_ms": 0}}, "step_time.decode_"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        SageConfig.parse(sections)


def test_numbers_out_of_range_are_refused_by_name() -> None:
    numbers = [
        (path.replace("NAME", "x"), leaf)
        for path, leaf in leaves(SCHEMA)
        if {"minimum", "exclusiveMinimum"} & leaf.keys()
    ]
    assert len(numbers) > 40
    for path, leaf in numbers:
        too_small = leaf["minimum"] - 1 if "minimum" in leaf else leaf["exclusiveMinimum"]
        too_large = leaf.get("exclusiveMaximum", 2 * leaf.get("maximum", 1e12))
        for value in (too_small, too_large, math.nan, "3", True):
            with pytest.raises(ConfigError, match=re.escape(path)):
                SageConfig.parse(nested(path, value))


@pytest.mark.parametrize("path", SECTIONS)
def test_any_settings_are_accepted_or_refused(path: str) -> None:
    fields = [field.name for field in dataclasses.fields(SECTIONS[path])]
    for name in (*fields, "\ud800", ""):
        for value in HOSTILE:
            with contextlib.suppress(ConfigError):
                sections = nested(path, {name: value})
                config = SageConfig.parse(sections)
                VALID.validate(sections)
                shown = Settings("sage", config).shown()
                json.dumps(shown, allow_nan=False)
                assert Settings.of(shown).shown() == shown
    for value in HOSTILE:
        with contextlib.suppress(ConfigError):
            SageConfig.parse(nested(path, value))


def test_given_settings_change_and_all_others_stay() -> None:
    first = {"schedule_policy": "ssjf", "policy": {"sage": {"regret": 4}}}
    changed = START.changed(first | {"preemption": {"enabled": False}})
    changed = changed.changed({"policy": {"sage": {"ttft_ms": 500}}})
    sage, preemption = changed.config.policy["sage"], changed.config.preemption
    assert (changed.schedule_policy, sage.regret, sage.ttft_ms) == ("ssjf", 4.0, 500.0)
    assert (preemption.enabled, preemption.host_pool_gib) == (False, 7)
    assert START.changed({}) == START
    assert START.shown()["overload"]["enabled"] is False


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *(({"schedule_policy": name}, "schedule_policy")
          for name in ("nobody", 1, "priority", "srpt-oracle")),
        ({"policy": {"sage": {"regret": -1.0}}}, "policy.sage.regret"),
        ({"policy": 3}, "policy"),
        ({"preemption": True}, "preemption"),
        ({"speed": 9}, "speed"),
        *(({section: {}}, section) for section in sorted(FIXED)),
        (["schedule_policy"], "schedule_policy"),
    ],
)  # fmt: skip
def test_changes_that_cannot_be_are_refused_by_name(changes: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        START.changed(changes)


@given(JSON)
def test_nonsense_is_refused_and_never_worse(changes: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert START.changed(changes) == START


@pytest.mark.parametrize("policy", [*policy_names(), *sorted(STOCK_POLICIES)])
def test_shown_settings_are_accepted(policy: str) -> None:
    settings = START.changed({"schedule_policy": policy, "policy": {"sage": {"regret": "inf"}}})
    shown = json.loads(json.dumps(settings.shown(), allow_nan=False))
    assert settings.changed(shown).shown() == settings.shown()
    assert shown["schedule_policy"] == policy
    assert shown["policy"]["sage"]["regret"] == "inf"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("/run/sage", Address(path="/run/sage")),
        ("~/sage", Address(path="~/sage")),
        ("./sage:1", Address(path="./sage:1")),
        ("localhost:80", Address(host="localhost", port=80)),
        ("127.0.0.1:65535", Address(host="127.0.0.1", port=65535)),
        ("[::1]:80", Address(host="::1", port=80)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "sage", ":80", "host:", "host:0", "host:65536", "a b:80", "::1:80", "/\0"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Address.parse(text)
