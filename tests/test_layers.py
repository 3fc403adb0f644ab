"""Imports point one way, and the core knows neither engine nor outside world."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from inspect import isfunction
from pathlib import Path

import pytest

from sage_sched.policy import Policy

ROOT = Path(__file__).parents[1]
PACKAGES = ("sage_sched", "patches", "predictor_store", "bench")
FORBIDDEN = {
    "sage_sched": {
        "predictor_store", "patches", "bench", "sglang", "torch", "faiss", "sentence_transformers",
        "time", "random", "os", "io", "pathlib", "datetime", "threading", "secrets", "socket",
    },
    "predictor_store": {"patches", "bench", "sglang"},
    "patches": {"bench"},
    "bench": {"tests"},
}  # fmt: skip
ROOMS = {"best_effort", "probe", "slo", "urgency"}
_CALLED = "|".join(name for name, one in vars(Policy).items() if isfunction(one) and name[0] != "_")
CALLS = rf"\.({_CALLED})\("
# Here names of policies, and sections of the configuration, become objects of the rooms.
EDGE = {"sage_sched.app.config", "sage_sched.app.registry"}


def modules_of(package: str) -> dict[str, Path]:
    """The files of a package by module name; a folder's own name is its `__init__`."""
    found = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = file
    return found


def imports_of(file: Path) -> Iterator[tuple[str, str]]:
    """Return each imported module, and the imported name ("" for the whole), also for types and
    within functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


@cache
def arrows_of(package: str) -> dict[str, set[str]]:
    """Imports among the modules of a package."""
    modules, arrows = modules_of(package), dict[str, set[str]]()
    for name, file in modules.items():
        wanted = {
            inner if (inner := f"{module}.{taken}") in modules else module
            for module, taken in imports_of(file)
        }
        arrows[name] = {one for one in wanted if one in modules and one != name}
    assert len(arrows) > 20
    return arrows


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_and_no_room_imports_itself_through_others(package: str) -> None:
    modules = arrows_of(package)
    room_of = {name: ".".join(name.split(".")[:2]) for name in modules}
    rooms = {room: set[str]() for room in room_of.values()}
    for name, wanted in modules.items():
        if package != "predictor_store" or name.count(".") > 0:
            rooms[room_of[name]] |= {room_of[one] for one in wanted} - {room_of[name]}
    for arrows in (modules, rooms):
        TopologicalSorter(arrows).prepare()  # raises for a circle


def room_of(module: str) -> str:
    """Return the room of the core to which a module belongs; "" if it stands in front."""
    package, name = [*module.split("."), ""][:2]
    return name if package == "sage_sched" and name in ROOMS else ""


def test_the_front_of_the_core_imports_neither_rooms_nor_edge() -> None:
    for name, wanted in arrows_of("sage_sched").items():
        if not room_of(name) and name not in EDGE:
            assert not [one for one in wanted if room_of(one)], name
        is_edge = name.startswith("sage_sched.app") or name in (
            "sage_sched.commands", "sage_sched.entry_points",
        )  # fmt: skip
        assert is_edge or not [one for one in wanted if one.startswith("sage_sched.app")], name


def test_the_rooms_of_the_core_are_entered_by_their_doors() -> None:
    # The bench takes policies apart, and tests look at single parts.
    entering = modules_of("sage_sched") | modules_of("patches") | modules_of("predictor_store")
    assert not [
        f"{name} imports {wanted}"
        for name, file in entering.items()
        for wanted, _ in imports_of(file)
        if (room := room_of(wanted))
        and wanted.count(".") > 1
        and not name.startswith(f"sage_sched.{room}")
    ]


def test_modules_that_read_sglang_import_none_of_ours() -> None:
    assert not arrows_of("patches")["patches.engine_types"]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    assert not [
        f"{name} imports {wanted}"
        for name, file in modules_of(package).items()
        for wanted, _ in imports_of(file)
        if wanted.split(".")[0] in FORBIDDEN[package]
    ]


@pytest.mark.parametrize(
    ("package", "pattern"),
    [
        # Only the core calls a policy (sage_sched.scheduler); stock.py is SGLang's own code.
        *(
            (package, CALLS)
            for package in ("patches", "predictor_store", "bench/simulator", "bench/engines")
        ),
        # A benchmark's request carries its true length (forced_length.py).
        ("sage_sched", r"forced|true_length|recorded|custom_params|output_ids"),
    ],
)
def test_executors_compare_no_keys_and_policies_read_no_true_length(
    package: str, pattern: str
) -> None:
    assert not [
        f"{file}:{number}"
        for file in (ROOT / package).rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if file.name != "stock.py" and re.search(pattern, line)
    ]
