"""What pyproject.toml cannot say: a wheel keeps the parts beside the core in sage_sched/parts.

Their names (`patches`, `bench`) are ones that a user's own packages may have. At the top level of
an environment, whichever was installed last would overwrite the other, and ours would hide a folder
of that name that somebody works in. sage_sched/app/parts_finder.py finds them there.
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
