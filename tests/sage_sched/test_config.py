from __future__ import annotations

from typing import Any

import pytest

from sage_sched.config import ConfigError, SageConfig


def test_every_field_has_a_default() -> None:
    assert SageConfig.parse({}) == SageConfig()


def test_sections_override_field_by_field() -> None:
    config = SageConfig.parse({"policy": {"aging_pools": 2}, "store": {"capacity": 5}})
    assert config.policy.aging_pools == 2.0
    assert config.store.capacity == 5
    assert config.policy.bucket_tokens == SageConfig().policy.bucket_tokens


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"polcy": {}}, ["polcy", "policy"]),
        ({"policy": {"agingpools": 3}}, ["agingpools", "aging_pools"]),
        ({"policy": {"aging_pools": "3"}}, ["policy.aging_pools", "'3'", "float"]),
        ({"policy": {"aging_pools": 0}}, ["policy.aging_pools", "0", "above 0"]),
        ({"policy": {"aging_pools": float("nan")}}, ["policy.aging_pools", "nan"]),
        ({"policy": {"bucket_tokens": True}}, ["policy.bucket_tokens", "True", "int"]),
        ({"policy": {"cost": "tokens"}}, ["policy.cost", "tokens", "resource-bound"]),
        ({"policy": 3}, ["policy", "3"]),
        ({"store": {"capacity": 0}}, ["store.capacity", "0"]),
        ({"store": {"path": 7}}, ["store.path", "7", "str"]),
        ({"predictor": {"threshold": 2.0}}, ["predictor.threshold", "2.0"]),
        ({"predictor": {"deadline_ms": -1}}, ["predictor.deadline_ms", "-1"]),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(
    sections: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        SageConfig.parse(sections)
    for name in names:
        assert name in str(error.value)
