"""Examples in the documentation run, and the files that it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.policies.srpt_oracle import ORACLE
from sage_sched.app.registry import policy_names
from tests.checks.pages import stale
from tests.pages import DOCS, blocks

ROOT = Path(__file__).parents[1]
POLICIES_MD = DOCS / "policies.md"

# Runs in a process of its own, because names are looked up once: the simulator, and a server's
# command line.
_SIMULATED = """
from dataclasses import replace

from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution

config = SageConfig.parse({"policy": {"deadlines": {"slo_ms_per_token": 50.0}}})
print(config.policy["deadlines"].slo_ms_per_token)
engine = replace(H800_QWEN3_32B, max_running_requests=1)
for policy in ("fcfs", "deadlines"):
    known = {tokens: LengthDistribution.from_samples([tokens], "history") for tokens in (9, 90)}
    asked = [(0.1 * i, 90 if i % 2 else 9) for i in range(40)]
    requests = [SimRequest(at_s, 500, n, 100, known[n], "") for at_s, n in asked]
    print(policy, round(simulate(engine, policy, config, requests).ttlt_s.mean()))
"""


def install_example(folder: Path) -> dict[str, str]:
    """Install the page's own policy as the page says. Return the environment that knows it."""
    source, installed = folder / "deadlines", folder / "installed"
    source.mkdir()
    for language in ("python", "toml"):
        for block in blocks(POLICIES_MD, language):
            if block.title:
                assert len(block.code.splitlines()) < 30
                (source / block.title).write_text(block.code, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *offline, "--target", str(installed), str(source)], check=True)
    path = [str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def test_the_example_policy_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in install_example(tmp_path).items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", _SIMULATED], capture_output=True, text=True, check=False
    )
    assert done.stdout == "50.0\nfcfs 41\ndeadlines 25\n", done.stderr


def test_tables_say_what_the_code_says() -> None:
    """If they differ, run `python -m tests.checks.pages`."""
    assert [page.name for page, _ in stale(sorted(DOCS.rglob("*.md")))] == []


def test_every_policy_is_in_the_table() -> None:
    table = POLICIES_MD.read_text(encoding="utf-8").split("## Which one")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `.*?\|", table, re.M)
    listed = set(re.findall(r"`([a-z+-]+)`", "".join(rows)))
    assert listed == {*policy_names(), ORACLE}


def test_every_file_and_folder_that_a_page_names_is_there() -> None:
    pages = [*DOCS.glob("*.md"), *ROOT.glob("*.md")]
    named = re.compile(r"`((?:sage_sched|predictor_store|patches|bench|tests)/[\w/.]*)`")
    missing = [
        f"{page.name}: {path}"
        for page in pages
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert not missing
