"""Builds a wheel that keeps the parts outside the core in sage_sched/parts, which pyproject.toml
cannot express.

A user's own packages may have the same names (`patches`, `bench`). At the top level of an
environment, or of a process, one of both would hide the other. So in a wheel ours are
`sage_sched.parts.patches` and so on, and each name of one of their modules is changed to that: in
imports, in texts that name a module, and in docstrings.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_PARTS = ("patches", "predictor_store", "bench")


class BuildWithParts(build_py):
    def run(self) -> None:
        if self.editable_mode:  # the checkout's own folders
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # of an earlier build, whatever is gone
        super().run()
        built = Path(self.build_lib)
        found = [f"{part}.{place.stem}" for part in _PARTS for place in (built / part).iterdir()]
        for file in built.rglob("*.py"):
            file.write_text(_renamed(file.read_text("utf-8"), found), "utf-8")
        for part in _PARTS:
            shutil.move(built / part, built / "sage_sched" / "parts" / part)


def _renamed(source: str, modules: list[str]) -> str:
    """Return a file's text with our private names. modules: the first two words of each module's
    name."""
    parts, named = "|".join(_PARTS), "|".join(map(re.escape, modules))
    source = re.sub(rf"(?<![\w./])({named})\b", r"sage_sched.parts.\1", source)
    source = re.sub(rf"\bfrom ({parts}) import", r"from sage_sched.parts.\1 import", source)
    return re.sub(rf"\bimport ({parts})\n", r"import sage_sched.parts.\1 as \1\n", source)


setup(cmdclass={"build_py": BuildWithParts})
