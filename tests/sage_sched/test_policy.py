"""Policies by name: ours, and those of installed packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engines.server import plugins
from sage_sched.app import registry
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import (
    ENTRY_POINT_GROUP,
    policy_named,
    policy_names,
    policy_type,
    section_of,
)
from sage_sched.slo import Proserve, ProserveParameters
from tests.sage_sched.strategies import SERVER


def test_a_variant_has_what_it_fixes_and_the_rest_of_its_section() -> None:
    assert policy_type("proserve-expected") is Proserve
    assert section_of("proserve-expected") == section_of("proserve") == "proserve"
    policy = policy_named("proserve-expected", {"proserve": ProserveParameters(eta=9.0)}, SERVER)
    assert policy.parameters == ProserveParameters(eta=9.0, density="expected")


def test_packages_add_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from sage_sched.policies.sage import Sage\nclass Mine(Sage): pass\n"
    (tmp_path / "theirs.py").write_text(code, encoding="utf-8")
    places = dict.fromkeys(("mine", "urgency", "fcfs"), "theirs:Mine")
    for name, place in {**places, "gone": "nowhere:Mine", "other": "pathlib:Path"}.items():
        plugins.install_as(tmp_path, name, place, ENTRY_POINT_GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_offers", registry._offers.__wrapped__)
    config = SageConfig.parse({"policy": {"sage": {"regret": 0.9}, "mine": {"regret": 0.1}}})
    assert SageConfig.parse(config.sections()) == config
    found = [policy_named(name, config.policy, SERVER).parameters for name in ("sage", "mine")]
    assert found == [config.policy["sage"], config.policy["mine"]]
    assert ("fcfs" in policy_names(), "urgency" in policy_names()) == (False, True)
    for name, said in (
        ("urgency", "two policies 'urgency'"), ("gone", "nowhere:Mine cannot be loaded"),
        ("other", "pathlib:Path is no subclass"), ("sega", "sega"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            policy_type(name)
