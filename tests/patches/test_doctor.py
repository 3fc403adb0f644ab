"""`sage-sched doctor`, in a process of its own, as it imports all of SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Twice: as things are; with settings that are wrong and SGLang's own switch, which leaves the CPU
# platform out too.
CODE = """
import os, sys
from sage_sched.cli import main
print(main(["doctor"]))
os.environ["SGLANG_PLUGINS"] = "somebodys"
print(main(["doctor", "--sage-config", sys.argv[1]]))
"""


def test_what_is_wrong_is_said_and_all_of_it_at_once(tmp_path: Path) -> None:
    settings = tmp_path / "sage.toml"
    settings.write_text("[admission]\nquantile = 2.0\n")
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", CODE, str(settings)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    healthy, _, wrong = done.stdout.partition("\n0\n")
    assert wrong, done.stdout + done.stderr
    assert {line.split()[0] for line in healthy.splitlines()} == {"ok"}
    assert "none yet in" in healthy
    assert wrong.splitlines()[-1] == "1"
    failed = {line.split()[1]: line for line in wrong.splitlines() if line.startswith("FAILED")}
    assert set(failed) == {"plugin", "settings", "encoder", "store"}
    assert "SGLANG_PLUGINS" in failed["plugin"]
    assert "admission.quantile" in failed["settings"]
