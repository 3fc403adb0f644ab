"""The wheel in an environment of its own serves, beside somebody's own packages of our names; and
the commands of the site's first pages do what they say there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import requests

from bench.servers.server import Server
from tests.engine.serving import CPU_FLAGS, UNHURRIED
from tests.installed import Installed, build, somebodys_folder
from tests.pages import DOCS, NOT_RUN, blocks


class Reader:
    """Somebody who types what a page says. MODEL and the port are theirs."""

    def __init__(self, installed: Installed, folder: Path, model: Path, cache: Path) -> None:
        self.folder = folder
        self.port = "30000"
        self._model = str(model)
        path = f"{installed.bin}:/usr/bin:/bin"
        self._env = installed.env | {"PATH": path, "XDG_CACHE_HOME": str(cache)}

    def commands_of(self, page: str) -> list[str]:
        """Those that are not marked as not run; the page's files are written first."""
        for name, text in blocks(DOCS / page, "json"):
            (self.folder / name).write_text(text + "\n", encoding="utf-8")
        found = blocks(DOCS / page, "sh")
        return [line for title, code in found if not title.startswith(NOT_RUN)
                for line in code.splitlines()]  # fmt: skip

    def types(self, command: str) -> str:
        """What it prints. Fails if its exit status is not 0."""
        typed = command.replace("MODEL", self._model).replace("30000", self.port)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", typed],
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{typed}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def test_it_serves_and_the_pages_commands_run(model: Path, tmp_path: Path) -> None:
    installed = Installed(tmp_path / "environment", build(tmp_path)[1], requirements=True)
    cache = tmp_path / "cache"
    reader = Reader(installed, somebodys_folder(tmp_path / "work"), model, cache)

    said = [reader.types(command) for command in reader.commands_of("warm.md")]
    assert re.search(r"records: +3 of at most", said[-1])

    doctor, serve, generate, info = reader.commands_of("index.md")
    assert "no fault found" in reader.types(f"{doctor} --device cpu")
    assert serve == "sage-sched serve --model-path MODEL --port 30000"
    here = ("bash", "-c", 'cd "$0" && exec "$@"', str(reader.folder))
    # The HTTP processes load no plugin, so they have to find the parts by themselves.
    flags = [*CPU_FLAGS, "--tokenizer-worker-num", "2"]
    env = {"PYTHONPATH": "", "XDG_CACHE_HOME": str(cache), **UNHURRIED}
    command = (*here, str(installed.bin / "sage-sched"), "serve")
    with Server(model, flags, log=tmp_path / "log", env=env, command=command) as server:
        reader.port = str(server.port)
        assert '"completion_tokens":16' in reader.types(generate)
        assert "num_records" in reader.types(info)
        for command_line in reader.commands_of("compare.md"):
            assert re.search(r"Successful requests: +2", reader.types(command_line))
        state = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]
    assert state["sage"]["predictor"]["worker_alive"]
    # One by hand, and of the benchmark two and one to warm up, twice.
    assert sum(state["sage"]["num_ranked"].values()) >= 1 + 2 * 3
