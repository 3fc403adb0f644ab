"""The shell of the two-servers check; `make two-servers` runs it."""

from __future__ import annotations

import subprocess

from tests.checks import two_servers


def test_every_step_is_a_shell_script() -> None:
    steps = two_servers.steps()
    assert len(steps) == 7
    for code in (*steps, two_servers.typed_apart("MODEL")):
        subprocess.run(["bash", "-n", "-c", code], check=True)
