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


def licence(package: Distribution) -> dict[str, str]:
    """Return what the metadata state: an expression, or the name of the classifiers or the text."""

    def of(field: str) -> list[str]:
        return package.metadata.get_all(field) or []

    if expression := of("License-Expression"):
        return {"expression": expression[0]}
    named = [line.rpartition(" :: ")[2] for line in of("Classifier") if "License :: " in line]
    text = "".join(of("License")).strip().partition("\n")[0]
    return {"name": ", ".join(named) or text[:_MAX_NAME_CHARS] or "not stated"}


def main() -> None:
    """Write both files."""
    found = {
        package.metadata["Name"].lower().replace("_", "-").replace(".", "-"): package
        for package in reversed([*distributions()])  # the first of each name on the path counts
    }
    components, under = list[dict[str, Any]](), defaultdict[str, list[str]](list)
    for name, package in sorted(found.items()):
        stated = licence(package)
        under["".join(stated.values())].append(f"{name} {package.version}")
        components.append(
            {
                "type": "library",
                "bom-ref": f"{name}=={package.version}",
                "name": name,
                "version": package.version,
                "purl": f"pkg:pypi/{name}@{package.version.replace('+', '%2B')}",
                "licenses": [stated if "expression" in stated else {"license": stated}],
            }
        )
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX",
        "specVersion": "1.6", "version": 1, "components": components,
    }  # fmt: skip
    rows = [f"| {name} | {', '.join(under[name])} |" for name in sorted(under, key=str.lower)]
    _FOLDER.mkdir(parents=True, exist_ok=True)
    (_FOLDER / "sbom.json").write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
    table = "\n".join(["| licence | packages |", "|---|---|", *rows, ""])
    (_FOLDER / "licences.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
