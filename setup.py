"""Builds a wheel that keeps the parts outside the core in sage_sched/parts, which pyproject.toml
cannot express.

A user's own packages may have the same names (`patches`, `bench`). At the top level of an
environment, the package installed last would overwrite the other, and ours would hide a user's
folder of that name. sage_sched/app/parts_finder.py finds the parts.
"""

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
        for name in _PARTS:
            shutil.move(built / name, built / "sage_sched" / "parts" / name)


setup(cmdclass={"build_py": BuildWithParts})
