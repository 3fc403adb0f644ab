from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches.ops import run_command

# As `dynamo.sglang` does: a parser of its own, with SGLang's flags, before any plugin is loaded.
LAUNCHER = """
import argparse, multiprocessing
from sglang.srt.server_args import ServerArgs


def tell(policy):
    print(__name__, policy, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    policy = parser.parse_args().schedule_policy
    tell(policy)
    child = multiprocessing.get_context("spawn").Process(target=tell, args=(policy,))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


@pytest.mark.long
def test_a_launcher_knows_our_policies_and_its_child_processes_start(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    flags = ["launcher", "--model-path", "MODEL", "--schedule-policy", "sage"]

    def start(*command: str) -> subprocess.CompletedProcess[str]:
        argv, env = [sys.executable, *command, *flags], {**os.environ, "PYTHONPATH": path}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)

    alone = start("-m")
    assert alone.returncode == 2
    assert "invalid choice: 'sage'" in alone.stderr
    ours = start("-c", "import sys; from sage_sched.cli import main; sys.exit(main())", "run")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.split() == ["__main__", "sage", "__mp_main__", "sage"]


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["--model-path", "M"], 2), (["-h"], 0)])
def test_without_a_module_it_says_what_it_wants(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command.run(argv) == status
    assert "name a module" in capsys.readouterr().err
