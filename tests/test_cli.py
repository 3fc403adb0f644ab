"""The command line, as a newcomer meets it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from sage_sched import cli
from sage_sched.cli import COMMANDS, OF_SERVERS, main


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    try:
        status = main([*argv])
    except SystemExit as end:
        status = int(str(end.code))
    return status, *capsys.readouterr()


def test_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, "--help")
    assert status == 0
    for name, (_, what) in (OF_SERVERS | COMMANDS).items():
        assert f"  {name:17} {what}\n" in out
    # Without any command the same is said, as an error.
    assert said(capsys)[::2] == (2, out)


@pytest.mark.parametrize("group", sorted({name.split()[0] for name in COMMANDS if " " in name}))
def test_groups_have_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, group, "--help")
    assert status == 0
    assert out.startswith(f"usage: sage-sched {group} ")
    named = [line.split("  ")[1] for line in out.splitlines() if line.startswith(f"  {group} ")]
    assert named == [name for name in COMMANDS if name.startswith(f"{group} ")]


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    versions = f"sage-sched {version('sage-sched')}, SGLang {version('sglang')}\n"
    assert said(capsys, "--version")[:2] == (0, versions)


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["wahtif", "log"], "invalid choice: 'wahtif' (choose from "),
        (["store", "inof"], "invalid choice: 'inof' (choose from "),
        (["store", "info", "--sotre", "x"], "sage-sched store info: error: unknown: --sotre x; "),
    ],
)
def test_what_is_not_known_is_named(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = said(capsys, *argv)
    assert (status, out) == (2, "")
    assert error in err


def test_a_package_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = types.ModuleType("command")
    command.__dict__.update(
        configure=lambda parser: None,
        run=lambda args: importlib.import_module("no_such_package.within"),
    )
    monkeypatch.setitem(sys.modules, COMMANDS["set"][0], command)
    status, _, err = said(capsys, "set")
    assert status == 1
    assert err.startswith("sage-sched: the package 'no_such_package' is not installed; ")
    # A missing module of ours is our fault.
    monkeypatch.setattr(cli, "ALL", ("no_such_package",))
    with pytest.raises(ModuleNotFoundError):
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
    assert main(["bench", "--output", str(tmp_path / "file" / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sage-sched bench: [Errno 20] Not a directory: ")
    assert len(said.splitlines()) == 1


def test_who_stops_reading_gets_no_traceback(tmp_path: Path) -> None:
    """Like `sage-sched --help | head -0`."""
    argv = ["explain", "--summary", "trace"]
    code = f"import sys; from sage_sched.cli import main; sys.exit(main({argv}))"
    (tmp_path / "trace").write_text("")
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("", 0, ""),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        ("<&-", 0, ""),
        (">/dev/full", 2, "sage-sched explain: [Errno 28] No space left on device\n"),
    ],
)
def test_no_output_gives_a_traceback(end: str, status: int, said: str, tmp_path: Path) -> None:
    """rid: what ASCII lacks."""
    (tmp_path / "trace").write_text(
        '{"t": 0, "is": "ends", "rid": "\u00fc", "tokens": 3, "why": "d\u00fc"}\n', encoding="utf-8"
    )
    code = "import sys; from sage_sched.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        f"exec {sys.executable} -c '{code}' explain \u00fc trace {end}", shell=True, cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, said)
    assert end or done.stdout == "    0.000 s  ends with 3 tokens (d\\xfc)\n"


def test_help_needs_no_home(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in COMMANDS:
        assert said(capsys, *name.split(), "--help")[0] == 0
    status, _, err = said(capsys, "store", "info")
    assert status == 2
    assert "set HOME" in err


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    command = types.ModuleType("command")
    command.__dict__.update(configure=lambda parser: None, run=lambda args: int("x"))
    monkeypatch.setitem(sys.modules, COMMANDS["set"][0], command)
    with pytest.raises(ValueError, match="invalid literal"):
        main(["set"])
