"""Lists installed packages with their licences: `python -m tests.checks.sbom`.

Writes a bill of materials of this environment (CycloneDX 1.6, sbom.json) and a table by licence
(licences.md) to a folder. Licences come from the packages' metadata; others stay unknown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

_UNKNOWN = "not stated"
# A licence field may hold the whole text.
_MAX_NAME_CHARS = 80


def installed() -> list[Distribution]:
    """Return one distribution of each name, the first on the path, sorted by name."""
    found: dict[str, Distribution] = {}
    for distribution in distributions():
        found.setdefault(_name(distribution), distribution)
    return [found[name] for name in sorted(found)]


def licence(distribution: Distribution) -> str:
    """Return the licence in the metadata: the expression, else the classifiers, else the text."""
    if expression := _field(distribution, "License-Expression"):
        return expression
    prefix = "License :: "
    stated = distribution.metadata.get_all("Classifier") or []
    classifiers = [line for line in stated if line.startswith(prefix)]
    if named := [line.rpartition(" :: ")[2] for line in classifiers]:
        return ", ".join(named)
    lines = _field(distribution, "License").strip().splitlines()
    return lines[0][:_MAX_NAME_CHARS] if lines else _UNKNOWN


def bill(packages: list[Distribution]) -> dict[str, Any]:
    """Return a bill of materials in the form of CycloneDX 1.6."""
    components = []
    for package in packages:
        name, stated = _name(package), licence(package)
        component: dict[str, Any] = {
            "type": "library",
            "bom-ref": f"{name}=={package.version}",
            "name": name,
            "version": package.version,
            "purl": f"pkg:pypi/{name}@{package.version.replace('+', '%2B')}",
        }
        if _field(package, "License-Expression"):
            component["licenses"] = [{"expression": stated}]
        elif stated != _UNKNOWN:
            component["licenses"] = [{"license": {"name": stated}}]
        components.append(component)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": components,
    }


def table(packages: list[Distribution]) -> str:
    """Return a table of licences, each with the packages under it."""
    under = defaultdict(list)
    for package in packages:
        under[licence(package)].append(f"{_name(package)} {package.version}")
    rows = [f"| {name} | {', '.join(under[name])} |" for name in sorted(under, key=str.lower)]
    return "\n".join(["| licence | packages |", "|---|---|", *rows, ""])


def _field(distribution: Distribution, name: str) -> str:
    values = distribution.metadata.get_all(name)
    return str(values[0]) if values else ""


def _name(distribution: Distribution) -> str:
    """Return the name as the package index spells it."""
    return str(distribution.metadata["Name"]).lower().replace("_", "-").replace(".", "-")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checks.sbom", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)
    packages = installed()
    args.output.mkdir(parents=True, exist_ok=True)
    for file, text in (
        (args.output / "sbom.json", json.dumps(bill(packages), indent=1) + "\n"),
        (args.output / "licences.md", table(packages)),
    ):
        file.write_text(text, encoding="utf-8")
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
