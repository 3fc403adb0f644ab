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

from sage_sched.cli import COMMANDS, OF_SERVERS
from tests.checks.pages import MODES
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.slow

ROOT = DOCS.parent
PAGES = sorted(DOCS.glob("*.md"))
# Pages whose commands tests/engine/test_installed.py runs as they stand.
RUN = {"index.md", "first-day.md", "predictor.md", "benchmarking.md"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_it_can_be_searched_and_takes_nothing_from_elsewhere(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "Gittins" in index
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(.*?)"', text
        )
        assert not [place for place in fetched if place.startswith(("http", "//"))], page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_is_run_by_a_test_or_marked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = blocks(page, "sh")
    # No block of commands, and no mark, that is not seen here.
    assert len(re.findall(r"```[ {.]*(?:ba|z|)sh|```[ {.]*shell", text)) == len(found)
    reasons = [block.why_not_run for block in found if block.why_not_run]
    assert text.count("Not run") == len(reasons)
    assert [reason for reason in reasons if not re.search(r"[:;,] \w", reason)] == []
    unmarked = [block.code for block in found if not block.why_not_run]
    # Without a fence there is no title.
    unmarked += re.findall(r"^    (?:sage-sched|sglang|python|make|curl|pip) .*", text, re.M)
    assert page.name in RUN or not unmarked


def commands() -> Iterator[tuple[str, str]]:
    """Page and command: lines of shell blocks, and code within the text that is one."""
    start = re.compile(r"(?:[A-Z_]+=\S+ )*(?:sage-sched|python -m|make) \S")
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        for code in re.findall(r"`([^`\n]+)`", text) + text.splitlines():
            line = code.strip()
            if start.match(line) and "[" not in line:
                yield page.name, line.split("  #")[0].replace("...", "")


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_what_a_command_names_is_there(page: str, command: str) -> None:
    words = [
        word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)
    ]
    flags = {word.partition("=")[0] for word in words if re.match(r"--[a-z-]+(=|$)", word)}
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets
    elif words[0] == "sage-sched":
        if words[1] in ("COMMAND", "--help", *OF_SERVERS):  # whose flags are SGLang's own
            return
        named = [name for name in COMMANDS if words[1:][: len(name.split())] == name.split()]
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[max(named, key=len)][0]).configure(parser)
        assert flags <= set(parser._option_string_actions)
    elif words[2].split(".")[0] in ("bench", "tests", "patches"):
        found = importlib.util.find_spec(words[2])
        assert found is not None
        assert found.origin is not None
        # Some build on the options of others, so they are looked for in all of that folder.
        files = [*(ROOT / "bench").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
        sources = "".join(file.read_text(encoding="utf-8") for file in files)
        assert not [flag for flag in flags if f'"{flag}"' not in sources and flag != "--help"]
    else:
        assert importlib.util.find_spec(words[2]) is not None


def test_the_tests_of_modes_are_there() -> None:
    modes = tomllib.loads(MODES.read_text(encoding="utf-8"))["modes"]
    assert [
        path for mode in modes for path in mode["tested_by"] if not (ROOT / path).exists()
    ] == []


def test_what_troubleshooting_tells_to_look_at_is_reported() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    files = [*(ROOT / "patches").rglob("*.py"), *(ROOT / "predictor_store").rglob("*.py")]
    sources = "".join(file.read_text(encoding="utf-8") for file in files)
    counters = re.findall(r"`(?:[a-z]+\.)*(num_[a-z_]+|widened)`", text)
    assert len(counters) > 6
    assert [name for name in counters if name not in sources] == ["num_retractions"]  # SGLang's
