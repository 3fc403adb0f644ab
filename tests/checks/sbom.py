"""Lists installed packages with their licences: `python -m tests.checks.sbom`.

Writes a bill of materials of this environment (CycloneDX 1.6, results/sbom.json) and a table by
licence (results/licences.md). Licences come from the packages' metadata.
"""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

_FOLDER = Path("results")
# A licence field may hold the whole text.
_MAX_NAME_CHARS = 80


def name_of(package: Distribution) -> str:
    """Return the name as the package index spells it."""
    return str(package.metadata["Name"]).lower().replace("_", "-").replace(".", "-")


def field(package: Distribution, name: str) -> str:
    """Return a field of its metadata, "" without one."""
    return "".join((package.metadata.get_all(name) or [""])[:1])


def licence(package: Distribution) -> str:
    """Return the licence in the metadata: the expression, else the classifiers, else the text."""
    if expression := field(package, "License-Expression"):
        return expression
    stated = package.metadata.get_all("Classifier") or []
    if named := [line.rpartition(" :: ")[2] for line in stated if line.startswith("License :: ")]:
        return ", ".join(named)
    lines = field(package, "License").strip().splitlines()
    return lines[0][:_MAX_NAME_CHARS] if lines else "not stated"


def component(package: Distribution) -> dict[str, Any]:
    """Return the package's entry in the bill of materials."""
    name, stated = name_of(package), licence(package)
    is_expression = stated == field(package, "License-Expression")
    return {
        "type": "library",
        "bom-ref": f"{name}=={package.version}",
        "name": name,
        "version": package.version,
        "purl": f"pkg:pypi/{name}@{package.version.replace('+', '%2B')}",
        "licenses": [{"expression": stated} if is_expression else {"license": {"name": stated}}],
    }


def main() -> None:
    """Write both files."""
    # The first of each name on the path counts.
    found = {name_of(package): package for package in reversed([*distributions()])}
    packages = [found[name] for name in sorted(found)]
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [component(package) for package in packages],
    }
    under = defaultdict(list)
    for package in packages:
        under[licence(package)].append(f"{name_of(package)} {package.version}")
    rows = [f"| {name} | {', '.join(under[name])} |" for name in sorted(under, key=str.lower)]
    _FOLDER.mkdir(parents=True, exist_ok=True)
    (_FOLDER / "sbom.json").write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
    table = "\n".join(["| licence | packages |", "|---|---|", *rows, ""])
    (_FOLDER / "licences.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
