from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches.ops import run_command

# Like `dynamo.sglang`, it has a parser of its own, with SGLang's flags, before any plugin is
# loaded.
LAUNCHER = """
import argparse, multiprocessing
from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    policy = parser.parse_args().schedule_policy
    child = multiprocessing.get_context("spawn").Process(target=print, args=(policy,))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


@pytest.mark.long
def test_a_launcher_knows_our_policies_and_its_child_processes_start(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for command, code, said in (
        (["-m"], 2, "invalid choice: 'sage'"),
        (["-c", "import sys; from sage_sched.cli import main; sys.exit(main())", "run"], 0, "sage"),
    ):
        flags = ["--model-path", "M", "--schedule-policy", "sage"]
        argv = [sys.executable, *command, "launcher", *flags]
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr


def test_without_a_module_it_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--model-path", "M"]):
        assert run_command.run(argv) == 2
        assert "name a module" in capsys.readouterr().err
    assert run_command.run(["--help"]) == 0
    found = capsys.readouterr()
    assert (found.out.startswith("usage: sage-sched run MODULE"), found.err) == (True, "")


def test_it_becomes_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    become: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, command: become.append(command))
    run_command.run(["launcher", "-h"])
    assert become == [[sys.executable, "-c", run_command._RUN, "launcher", "-h"]]
