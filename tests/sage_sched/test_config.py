from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bench.policies.ltr import LtrParameters
from sage_sched.app.config import PreemptionConfig, SageConfig, StepTimeConfig
from sage_sched.app.registry import POLICIES
from sage_sched.app.schema import json_schema
from sage_sched.app.switch import Settings
from sage_sched.fields import ConfigError, hints_of, section_in
from sage_sched.policies.sage import SageParameters
from sage_sched.slo import SloClass, SloConfig


def test_every_field_has_a_default() -> None:
    assert SageConfig.parse({}) == SageConfig()


def test_sections_override_field_by_field() -> None:
    config = SageConfig.parse({"policy": {"sage": {"regret": 3}}, "store": {"capacity": 5}})
    assert config.policy == {"sage": SageParameters(regret=3.0)}
    assert config.store.capacity == 5
    assert config.store.on_disk == SageConfig().store.on_disk


def test_what_it_says_of_itself_is_parsed_to_the_same() -> None:
    policy = {"sage": SageParameters(regret=0.5), "ltr": LtrParameters(7.0)}
    slo = SloConfig(trust="body", default="low", classes={"low": SloClass(tpot_slo_ms=50.0)})
    config = SageConfig(policy=policy, preemption=PreemptionConfig(host_pool_gib=7.0), slo=slo)
    assert SageConfig.parse(config.sections()) == config


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"polcy": {}}, ["polcy", "mean policy?"]),
        ({"policy": {"sage": {"regrets": 3}}}, ["regrets", "mean regret?", "ttft_ms, regret"]),
        ({"decode": {"max_gap_s": 1}}, ["max_gap_s", "mean max_gap_ms?", "max_away_ms"]),
        ({"decode": {"max_gap_ms": "1 s"}}, ["decode.max_gap_ms", "'1 s'", "from 1", "(ms)"]),
        ({"decode": {"max_gap_ms": math.nan}}, ["decode.max_gap_ms", "nan", "from 1"]),
        ({"decode": {"max_gap_ms": 1e12}}, ["decode.max_gap_ms", "00.0,", "1000000000, or inf"]),
        ({"policy": {"sage": {"regret": "3"}}}, ["policy.sage.regret", "'3'", "a number from 0"]),
        ({"policy": {"sage": {"regret": -0.5}}}, ["policy.sage.regret", "-0.5", ", or inf"]),
        ({"policy": {"sage": {"regret": float("nan")}}}, ["policy.sage.regret", "nan"]),
        (
            {"policy": {"fastserve": {"refresh_interval_tokens": True}}},
            ["policy.fastserve.refresh", "True", "a whole number from 1"],
        ),
        ({"policy": {"regret": 2.0}}, ["policy.regret", "unknown policy", "sage"]),
        ({"policy": {"sage": 2.0}}, ["policy.sage", "2.0"]),
        (
            {"policy": {"proserve-expected": {"eta": 1.0}}},
            ["policy.proserve-expected", "variant", "policy.proserve"],
        ),
        ({"policy": {"ssjf": {"x": 1.0}}}, ["policy.ssjf", "x", "none"]),
        ({"preemption": {"host_pool_gib": -1}}, ["preemption.host_pool_gib", "-1", "(GiB)"]),
        ({"admission": {"quantile": 0.5}}, ["section", "admission", "preemption"]),
        ({"slo": {"trust": "all"}}, ["slo.trust", "all", "'body', 'header', 'none'"]),
        ({"slo": {"default": "x"}}, ["slo.default", "x", "none"]),
        ({"slo": {"classes": 3}}, ["slo.classes", "3", "[slo.classes.NAME]"]),
        ({"slo": {"classes": {"x": {"weigt": 1}}}}, ["slo.classes.x", "weigt", "weight"]),
        (
            {"slo": {"classes": {"x": {"weight": 0}}}},
            ["slo.classes.x.weight", "0", "0.001 to"],
        ),
        ({"slo": {"classes": {"x": {"ttft_slo_ms": float("nan")}}}}, ["x.ttft_slo_ms", "nan"]),
        (
            {"slo": {"classes": {"x": {"tpot_slo_ms": 50, "min_tpot_slo_ms": 51}}}},
            ["slo.classes.x.min_tpot_slo_ms", "51", "50"],
        ),
        (
            {"slo": {"default": "x", "classes": {"x": {"max_share": 0.5}}}},
            ["slo.classes.x.max_share", "0.5", "default"],
        ),
        (
            {"slo": {"classes": {"x": {}, "y": {"priority": 0}}}},
            ["slo.classes.y.priority", "0", "slo.classes.x"],
        ),
        ({"policy": 3}, ["policy", "3"]),
        ({"store": {"path": 7}}, ["store.path", "7", "a text"]),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(
    sections: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        SageConfig.parse(sections)
    for name in names:
        assert name in str(error.value)


# Of whatever may stand in a file, or come by POST /sage/settings.
HOSTILE: tuple[Any, ...] = (
    0, -0.0, 5e-324, 1e308, math.inf, -math.inf, math.nan, -1, 2**63, 10**400, -(10**400), True,
    None, "", "inf", "\ud800", "\0", [], {}, [[]], {"\ud800": {}}, {"": 10**400},
)  # fmt: skip
VALID = Draft202012Validator(json_schema())
SECTIONS = [
    *(
        (name, section)
        for name, hint in hints_of(SageConfig).items()
        if (section := section_in(hint))
    ),
    *((f"policy.{name}", policy.Parameters) for name, policy in POLICIES.items()),
    ("slo.classes.x", SloClass),
]


def nested(path: str, value: object) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(("path", "section"), SECTIONS, ids=[path for path, _ in SECTIONS])
def test_whatever_is_given_is_taken_or_refused(path: str, section: type[Any]) -> None:
    for name in (*(field.name for field in dataclasses.fields(section)), "\ud800", ""):
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


def test_steps_take_time() -> None:
    with pytest.raises(ConfigError, match=r"step_time\.decode_\*_ms"):
        StepTimeConfig(decode_base_ms=0, decode_kv_token_ms=0)
    StepTimeConfig(decode_base_ms=0, decode_kv_token_ms=1e-4)
