"""Policies by name: ours, and those of installed packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.engines.server import plugins
from bench.policies import POLICIES
from sage_sched.app.registry import ENTRY_POINT_GROUP, RIVALS, policy_named, policy_type, section_of
from sage_sched.slo import Proserve, ProserveParameters
from tests.sage_sched.strategies import SERVER

_THEIRS = """
from sage_sched.policies.sage import Sage


class Mine(Sage):
    pass
"""
_LOOKED_UP = """
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_named, policy_names, policy_type
from tests.sage_sched.strategies import SERVER

config = SageConfig.parse({"policy": {"sage": {"regret": 0.9}, "mine": {"regret": 0.1}}})
assert SageConfig.parse(config.sections()) == config
print(policy_named("sage", config.policy, SERVER).parameters.regret)
print(policy_named("mine", config.policy, SERVER).parameters.regret)
print("fcfs" in policy_names(), "urgency" in policy_names())
for name in ("urgency", "gone", "sega"):
    try:
        policy_type(name)
    except ValueError as error:
        print(error)
"""


def test_a_variant_has_what_it_fixes_and_the_rest_of_its_section() -> None:
    assert policy_type("proserve-expected") is Proserve
    assert section_of("proserve-expected") == section_of("proserve") == "proserve"
    policy = policy_named("proserve-expected", {"proserve": ProserveParameters(eta=9.0)}, SERVER)
    assert policy.parameters == ProserveParameters(eta=9.0, density="expected")


def test_policies_of_comparisons_are_found_by_name() -> None:
    assert {name: policy_type(name) for name in RIVALS} == POLICIES
    assert all(section_of(name) == name for name in RIVALS)


def test_packages_add_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(_THEIRS, encoding="utf-8")
    places = {"mine": "theirs:Mine", "urgency": "theirs:Mine", "fcfs": "theirs:Mine"}
    for name, place in {**places, "gone": "nowhere:Mine"}.items():
        environment = plugins.install_as(tmp_path, name, place, ENTRY_POINT_GROUP)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
    done = subprocess.run([sys.executable, "-c", _LOOKED_UP], capture_output=True, text=True)
    sage, mine, names, clash, gone, unknown = done.stdout.splitlines()
    assert (sage, mine, names) == ("0.9", "0.1", "False True"), done.stderr
    assert "two policies 'urgency'" in clash
    assert gone.startswith("nowhere:Mine cannot be loaded")
    assert "sega" in unknown
