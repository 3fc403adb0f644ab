"""The command line as a newcomer sees it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sage_sched.cli import main
from sage_sched.commands import COMMANDS, OF_SERVERS

RUN = "import sys; from sage_sched.cli import main; sys.exit(main(sys.argv[1:]))"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Return exit status, stdout and stderr."""
    try:
        status = main([*argv])
    except SystemExit as end:
        status = int(str(end.code))
    return status, *capsys.readouterr()


def replace_set(monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], Any]) -> None:
    command: Any = SimpleNamespace(configure=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, COMMANDS["set"][0], command)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, "--help")
    assert (status, [name for name in OF_SERVERS | COMMANDS if f"  {name} " not in out]) == (0, [])
    # Without a command the same text is an error.
    assert said(capsys)[::2] == (2, out)
    versions = f"sage-sched {version('sage-sched')}, SGLang {version('sglang')}\n"
    assert said(capsys, "--version")[:2] == (0, versions)


def test_every_command_and_group_has_help_without_a_home(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in {*COMMANDS, *(name.split()[0] for name in COMMANDS)}:
        assert said(capsys, *name.split(), "--help")[0] == 0
    status, _, err = said(capsys, "store", "info")
    assert (status, "set HOME" in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "unknown"),
    [("wahtif log", "'wahtif'"), ("store inof", "'inof'"), ("store info --sotre x", "--sotre x")],
)
def test_unknown_words_are_named(
    argv: str, unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = said(capsys, *argv.split())
    assert (status, out, unknown in err) == (2, "", True)


def test_a_package_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_with(error: BaseException) -> None:
        def end(args: object) -> int:
            raise error

        replace_set(monkeypatch, end)

    replace_set(monkeypatch, lambda args: importlib.import_module("no_such_package.within"))
    status, _, err = said(capsys, "set")
    assert (status, "'no_such_package' is not installed" in err) == (1, True)
    ends_with(ImportError("no libcudart", name="faiss"))
    status, _, err = said(capsys, "set")
    assert (status, "'faiss' cannot be imported (no libcudart)" in err) == (1, True)
    # A missing module of ours is our fault, which is not hidden.
    replace_set(monkeypatch, lambda args: importlib.import_module("patches.no_such_module"))
    with pytest.raises(ModuleNotFoundError):
        main(["set"])
    ends_with(KeyboardInterrupt())  # not by SIGINT, which this process may ignore
    assert main(["set"]) == 128 + signal.SIGINT
    replace_set(monkeypatch, lambda args: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["set"])


def test_commands_are_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace").write_text("")
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    for is_terminal in (True, False):
        monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda now=is_terminal: now))
        assert main(["explain", "--summary", str(tmp_path / "trace")]) == 0
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        assert ("TQDM_DISABLE" in os.environ) is not is_terminal
    # A user's own setting counts.
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert main(["explain", "--summary", str(tmp_path / "trace")]) == 0
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = said(capsys, "bench", "fit", "--output", str(tmp_path / "file" / "out"))
    assert (status, len(err.splitlines()), "Not a directory" in err) == (2, 1, True)


def test_a_closed_pipe_gives_no_traceback(tmp_path: Path) -> None:
    """Like `sage-sched --help | head -0`."""
    (tmp_path / "trace").write_text("")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", RUN, "explain", "--summary", "trace"]
    done = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [("", 0, ""), (">&- 2>&-", 0, ""), ("<&-", 0, ""), (">/dev/full", 2, "No space left")],
)
def test_no_output_gives_a_traceback(end: str, status: int, error: str, tmp_path: Path) -> None:
    # The id has characters that ASCII lacks.
    (tmp_path / "trace").write_text(
        '{"t": 0, "is": "ends", "rid": "\u00fc", "tokens": 3, "why": "d\u00fc"}\n', encoding="utf-8"
    )
    done = subprocess.run(
        f"exec {sys.executable} -c '{RUN}' explain \u00fc trace {end}", shell=True, cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert (done.returncode, error in done.stderr) == (status, True)
    assert "Traceback" not in done.stderr
    assert end or "(d\\xfc)" in done.stdout
