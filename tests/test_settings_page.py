"""docs/settings.md says what the configuration has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from sage_sched.config import SageConfig, StepTimeConfig
from sage_sched.policies.sage import SageParameters
from sage_sched.slo import SloClass

PAGE = (Path(__file__).parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")


def listed() -> dict[str, set[str]]:
    """The fields that the table names, by section."""
    found: dict[str, set[str]] = {}
    section = ""
    for row in re.findall(r"^\|(.*?)\|(.*?)\|", PAGE, re.M):
        section = row[0].strip("` ") or section
        found.setdefault(section, set()).update(re.findall(r"`(\w+)`", row[1]))
    return found


def test_every_field_is_listed_in_its_section_and_no_other() -> None:
    given = dataclasses.replace(SageConfig(), step_time=StepTimeConfig())
    sections = {
        field.name: type(getattr(given, field.name))
        for field in dataclasses.fields(SageConfig)
        if field.name != "policy"
    } | {"policy.sage": SageParameters, "slo.classes.NAME": SloClass}
    page = listed()
    for name, section in sections.items():
        fields = {field.name for field in dataclasses.fields(section)}
        fields -= {"classes"}  # sections of their own
        if name == "step_time":  # first and last stand for all
            assert page[name] <= fields
        else:
            assert page[name] == fields, name
    assert {name for name in page if page[name]} == set(sections)
