"""The bill of materials names all installed packages and no others."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from tests.checks import lock, sbom

ROOT = Path(__file__).parents[2]


def test_every_pinned_package_is_in_it_with_its_version(tmp_path: Path) -> None:
    assert sbom.main(["--output", str(tmp_path)]) == 0
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {part["name"]: part["version"] for part in bill["components"]}
    assert len(found) == len(bill["components"]), "a package is named twice"
    pinned = [pin.split("==")[0] for pin in lock.read(ROOT / "requirements.txt")]
    names = {name: name.lower().replace("_", "-").replace(".", "-") for name in pinned}
    assert {name: found.get(names[name]) for name in pinned} == {n: version(n) for n in pinned}
    assert all(part["purl"].startswith("pkg:pypi/") for part in bill["components"])
    licences = (tmp_path / "licences.md").read_text().splitlines()
    (numpy,) = (line for line in licences if f"numpy {version('numpy')}" in line)
    assert numpy.startswith("| BSD-3-Clause")
