"""The site builds without a warning, and the commands on its pages exist."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sage_sched.commands import COMMANDS, OF_SERVERS
from tests.checks.pages import MODES
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.slow

ROOT = DOCS.parent
PAGES = sorted(DOCS.glob("*.md"))
# Pages whose commands tests/engine/test_installed.py runs as they stand.
RUN = {"index.md", "first-day.md", "predictor.md", "benchmarking.md"}
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:sage-sched|python -m|make) \S")


def test_it_can_be_searched_and_takes_nothing_from_elsewhere(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    assert "Gittins" in (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8")
    fetched = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(?:http|//)')
    pages = [*tmp_path.rglob("*.html")]
    assert not [page for page in pages if fetched.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_is_run_by_a_test_or_marked(page: Path) -> None:
    text, found = page.read_text(encoding="utf-8"), blocks(page, "sh")
    # This test sees every block of commands, and every mark.
    assert len(re.findall(r"```[ {.]*(?:ba|z|)sh|```[ {.]*shell", text)) == len(found)
    assert text.count("Not run") == sum(bool(block.why_not_run) for block in found)
    assert page.name in RUN or all(block.why_not_run for block in found)


def commands() -> Iterator[tuple[str, str]]:
    """Yield each page's commands: lines of shell blocks, and code within the text."""
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        for code in re.findall(r"`([^`\n]+)`", text) + text.splitlines():
            line = code.strip()
            if _COMMAND.match(line) and "[" not in line:
                yield page.name, line.split("  #")[0].replace("...", "")


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_names_in_commands_exist(page: str, command: str) -> None:
    words = re.sub(r"^(?:[A-Z_]+=\S+ )*", "", command)
    program, *argv = shlex.split(words, comments=True)
    flags = {word.partition("=")[0] for word in argv if re.match(r"--[a-z-]+(=|$)", word)}
    if program == "make":
        assert argv[0] in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    elif program == "sage-sched":
        if argv[0] in ("COMMAND", "--help", *OF_SERVERS):  # whose flags are SGLang's own
            return
        named = [name for name in COMMANDS if argv[: len(name.split())] == name.split()]
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[max(named, key=len)][0]).configure(parser)
        assert flags <= set(parser._option_string_actions)
    else:
        assert importlib.util.find_spec(argv[1]) is not None
        if argv[1].split(".")[0] in ("bench", "tests", "patches"):
            # Some build on the options of others, so the whole folder is searched.
            files = [*(ROOT / "bench").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
            sources = "".join(file.read_text(encoding="utf-8") for file in files)
            assert not [flag for flag in flags if f'"{flag}"' not in sources and flag != "--help"]


def test_the_tests_of_modes_are_there() -> None:
    modes = tomllib.loads(MODES.read_text(encoding="utf-8"))
    named = {path for _, _, *tests in modes.values() for path in tests}
    assert [path for path in named if not (ROOT / "tests" / path).exists()] == []
