from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from patches.flags import named
from patches.ops import serve_command
from patches.ops.serve_command import _HELP, _SERVE, with_policy

SAGE = ["--schedule-policy", "sage"]


@pytest.mark.parametrize(
    ("argv", "file", "added"),
    [
        (["--model-path", "M"], "", SAGE),
        (["M", "--tp", "2"], "", SAGE),
        (["--model-path=M", "--sage-config", "c.toml"], "", SAGE),
        (["--schedule-policy=lpm"], "", []),
        (["--schedule-pol", "lpm"], "", []),
        (["--sage-shadow", "record"], "", []),
        (["--sage-sh=record"], "", []),
        (["--config", "{file}"], "tp-size: 2\n", SAGE),
        (["--config", "{file}"], "schedule-policy: fcfs\n", []),
        (["--config", "{file}", "--tp", "2"], "sage-shadow: record\n", []),
        (["M", "--schedule-conservativeness", "1", "--their-own-flag", "x"], "", SAGE),
        # The model is where SGLang looks for it.
        (["--config", "{file}"], "model-path: M\n", [*SAGE, "--model-path", "M"]),
        (["--model-pa", "M"], "", [*SAGE, "--model-path", "M"]),
    ],
)
def test_a_policy_is_added(argv: list[str], file: str, added: list[str], tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text(file)
    argv = [arg.format(file=tmp_path / "server.yaml") for arg in argv]
    assert with_policy(argv) == [*argv, *added]


@pytest.mark.parametrize("argv", [["--model-path", "M"], ["M"], ["--conf", "file"], ["M", "-h"]])
def test_it_becomes_a_server_of_sglang_or_its_help(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    become: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, command: become.append(command))
    assert serve_command.run(["--port", "30000"]) == 2
    assert not become
    serve_command.run(argv)
    rest = ["-W", "ignore", "-c", _HELP] if "-h" in argv else ["-c", _SERVE, "serve", *argv]
    assert become == [[sys.executable, "-P", *rest]]
    # It goes on as `sglang serve`.
    monkeypatch.setitem(sys.modules, "sglang.cli.main", SimpleNamespace(main=lambda: 3))  # type: ignore[arg-type]
    monkeypatch.setattr("sys.argv", ["-c", "serve", "M"])
    assert (serve_command.serve(), sys.argv) == (3, ["-c", "serve", "M", *SAGE])


def test_flags_are_found_by_any_name_and_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("sage-config: a.toml\ntp: 4\nchunked-prefill-size: 9\n")
    argv = ["--config", f"{tmp_path}/server.yaml", "--chunked-prefill=7", "--tensor-par", "2"]
    assert named(argv) == {"sage_config": "a.toml", "tp_size": "2", "chunked_prefill_size": "7"}


@pytest.mark.parametrize(
    "content", ["schedule-policy: [", "1: 2\n", "- a\n", "[" * 5000, None, "lora-paths: 2024-02-31"]
)
def test_a_file_that_cannot_be_read_is_a_reason(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "server.yaml"
    file.mkdir() if content is None else file.write_text(content)
    with pytest.raises((ValueError, OSError)):
        with_policy(["--config", str(file)])
    monkeypatch.setattr("sys.argv", ["sage-sched", "serve", "--config", str(file)])
    assert serve_command.serve() == 2
    assert capsys.readouterr().err.count("\n") == 1
