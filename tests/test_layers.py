"""Imports point one way, and the core knows neither engine nor outside world."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "sage_sched": {
        "predictor_store", "patches", "bench", "sglang", "torch", "faiss", "sentence_transformers",
        "time", "random", "os", "io", "pathlib", "datetime", "threading", "secrets", "socket",
    },
    "predictor_store": {"patches", "bench", "sglang"},
    "patches": {"bench"},
    "bench": {"tests"},
}  # fmt: skip


def imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def modules_of(package: str) -> dict[str, Path]:
    """The files of a package by module name; a folder's own name is its `__init__`."""
    found = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = file
    return found


def arrows_of(package: str) -> dict[str, set[str]]:
    """Imports among the modules of a package, for types and within functions too."""
    modules, arrows = modules_of(package), dict[str, set[str]]()
    for name, file in modules.items():
        arrows[name] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted = [one if one in modules else str(node.module) for one in inner]
            else:
                continue
            arrows[name] |= {one for one in wanted if one in modules and one != name}
    return arrows


def circles_of(arrows: dict[str, set[str]]) -> list[str]:
    """The modules that import themselves through others."""

    def reached(start: str) -> set[str]:
        found, ahead = set[str](), [start]
        while ahead:
            new = arrows[ahead.pop()] - found
            found |= new
            ahead += new
        return found

    return [name for name in arrows if name in reached(name)]


@pytest.mark.parametrize("package", ["sage_sched", "patches", "predictor_store", "bench"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    assert not circles_of(arrows_of(package))


ROOMS = {"best_effort", "fairness", "probe", "slo", "urgency"}
# Where names of policies, and sections of the configuration, become objects of the rooms.
EDGE = {"sage_sched.app.config", "sage_sched.app.registry"}


def room_of(module: str) -> str:
    """The room of the core that a module belongs to, "" if it stands in front."""
    name = [*module.split("."), ""][1]
    return name if name in ROOMS else ""


def test_what_stands_in_front_of_the_core_rests_on_no_room() -> None:
    arrows = arrows_of("sage_sched")
    front = {name: wanted for name, wanted in arrows.items() if not room_of(name)}
    assert len(front) > 20
    found = [
        f"{name} imports {one}"
        for name, wanted in front.items()
        for one in wanted
        if room_of(one) and name not in EDGE
    ]
    assert not found


def test_the_core_does_not_import_its_edge() -> None:
    entrances = {"sage_sched.cli", "sage_sched.entry_points"}
    core = {
        name: wanted
        for name, wanted in arrows_of("sage_sched").items()
        if not name.startswith("sage_sched.app") and name not in entrances
    }
    assert len(core) > 40
    assert not [
        name for name in core if any(one.startswith("sage_sched.app") for one in core[name])
    ]


def test_the_rooms_of_the_core_are_entered_by_their_doors() -> None:
    # The bench takes policies apart, and tests look at single parts.
    modules = modules_of("sage_sched")
    for room in ROOMS:
        door = modules[f"sage_sched.{room}"].read_text(encoding="utf-8")
        assert door.startswith('"""')
        assert "__all__" in door
    entering = {**modules, **modules_of("patches"), **modules_of("predictor_store")}
    found = [
        f"{name} imports {wanted}"
        for name, file in entering.items()
        for wanted in imports_of(file)
        if wanted.count(".") > 1
        and wanted.startswith("sage_sched.")
        and room_of(wanted)
        and not name.startswith(f"sage_sched.{room_of(wanted)}")
    ]
    assert not found


@pytest.mark.parametrize(
    ("package", "least_rooms"),
    [("sage_sched", 30), ("patches", 11), ("bench", 8), ("predictor_store", 7)],
)
def test_no_room_imports_itself_through_others(package: str, least_rooms: int) -> None:
    modules = arrows_of(package)
    room_of = {name: ".".join(name.split(".")[:2]) for name in modules}
    rooms = {room: set[str]() for room in room_of.values()}
    for name, wanted in modules.items():
        if package != "predictor_store" or name.count(".") > 0:
            rooms[room_of[name]] |= {room_of[one] for one in wanted} - {room_of[name]}
    assert len(rooms) >= least_rooms
    assert not circles_of(rooms)


def test_what_is_read_of_sglang_rests_on_nothing_of_ours() -> None:
    assert not arrows_of("patches")["patches.engine_types"]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package: str) -> None:
    found = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for name in imports_of(file)
        if name.split(".")[0] in FORBIDDEN[package]
    ]
    assert not found


def lines_with(pattern: str, files: Iterable[Path]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_the_executors_compare_no_keys() -> None:
    # Order, admission and preemption are the core's decisions; stock.py is SGLang's own code.
    simulator = ROOT / "bench" / "simulator"
    files = [*(ROOT / "patches").rglob("*.py"), *simulator.glob("*.py")]
    assert len(files) > 20
    files = [file for file in files if file.name != "stock.py"]
    assert not lines_with(r"\.key\(|should_preempt|serving_order|on_prediction\b|\.place\b", files)


def test_no_policy_reads_a_true_length() -> None:
    # A benchmark's request carries its true length (forced_length.py).
    files = sorted((ROOT / "sage_sched").rglob("*.py"))
    assert files
    assert not lines_with(r"forced|true_length|recorded|custom_params|output_ids", files)
