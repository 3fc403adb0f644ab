"""The installed wheel serves next to other packages of the same names, and the commands of the
site's first pages work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import requests

from bench.engines.server.server import Server
from tests.engine.serving import CPU_FLAGS, UNHURRIED, states, wait_until
from tests.installed import Installed, build, somebodys_folder
from tests.pages import DOCS, blocks


class Reader:
    """A reader who types the commands of a page, with their own model and port."""

    def __init__(self, installed: Installed, folder: Path, model: Path) -> None:
        self.folder, self.port = folder, 30000
        self._bin, self._model = installed.bin, str(model)
        path, cache = f"{installed.bin}:/usr/bin:/bin", str(folder.parent / "cache")
        self._env = installed.env | {"PATH": path, "XDG_CACHE_HOME": cache}

    def steps_of(self, page: str) -> list[str]:
        """Write the page's files. Return its blocks of commands, except blocks that are marked as
        not run."""
        for file in (*blocks(DOCS / page, "json"), *blocks(DOCS / page, "python")):
            text = file.code.replace("30000", str(self.port))
            (self.folder / file.title).write_text(text + "\n", encoding="utf-8")
        return [block.code for block in blocks(DOCS / page, "sh") if not block.why_not_run]

    def commands_of(self, page: str) -> list[str]:
        return [line for code in self.steps_of(page) for line in code.splitlines()]

    def types(self, command: str) -> str:
        """Return the output. Fails if the exit status is not 0."""
        url = f"sage-sched set --url http://127.0.0.1:{self.port}"
        typed = command.replace("MODEL", self._model).replace("30000", str(self.port))
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", typed.replace("sage-sched set", url)],
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{typed}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def starts(self, serve: str, *flags: str) -> Server:
        """Return a server by this command, for which the page uses a separate terminal."""
        words = serve.replace("MODEL", self._model).split()
        assert words[:5] == ["sage-sched", "serve", "--model-path", self._model, "--port"]
        here = ("bash", "-c", 'cd "$0" && exec "$@"', str(self.folder))
        command = (*here, str(self._bin / words[0]), words[1])
        env = {"PYTHONPATH": "", "XDG_CACHE_HOME": self._env["XDG_CACHE_HOME"], **UNHURRIED}
        log, all_flags = self.folder.parent / "log", [*words[6:], *CPU_FLAGS, *flags]
        return Server(Path(self._model), all_flags, log=log, env=env, command=command)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    return Installed(folder / "environment", build(folder)[1], requirements=True)


def test_it_serves_and_the_pages_commands_run(
    installed: Installed, model: Path, tmp_path: Path
) -> None:
    reader = Reader(installed, somebodys_folder(tmp_path / "work"), model)
    reader.steps_of("first-day.md")  # whose file predictor.md warms from
    said = [reader.types(command) for command in reader.commands_of("predictor.md")]
    assert "num_records: 3\n" in said[-1]

    doctor, serve, generate, info = reader.commands_of("index.md")
    assert "no fault found" in reader.types(f"{doctor} --device cpu")
    # The HTTP processes load no plugin, so they have to find the parts by themselves.
    with reader.starts(serve, "--tokenizer-worker-num", "2") as server:
        reader.port = server.port
        assert '"completion_tokens":16' in reader.types(generate)
        assert "num_records" in reader.types(info)
        for command in reader.commands_of("benchmarking.md"):
            assert re.search(r"Successful requests: +2", reader.types(command))
        (state,) = states(server)
    assert state["sage"]["predictor"]["worker_alive"]
    # One by hand. Each of two runs of the benchmark sends two, and one to warm up.
    assert sum(state["sage"]["num_predicted"].values()) >= 1 + 2 * 3


@pytest.mark.long
def test_a_first_day(installed: Installed, model: Path, tmp_path: Path) -> None:
    reader = Reader(installed, tmp_path / "work", model)
    reader.folder.mkdir()
    doctor, warm, serve, *_ = reader.steps_of("first-day.md")
    assert "no fault found" in reader.types(f"{doctor} --device cpu")
    reader.types(warm)
    with reader.starts(serve) as server:
        reader.port = server.port
        ask, see, what_if, switch = reader.steps_of("first-day.md")[3:]
        # Only its cap ends an answer of the small model, and two cores are slow.
        script = reader.folder / "ask.py"
        script.write_text(script.read_text().replace("192", "96"))
        assert re.findall(r"^(\d+) answers", reader.types(ask), re.M) == ["20", "60"]
        # Metrics are brought up to date every two seconds.
        metrics = f"{server.url}/metrics"
        wait_until(lambda: "sage:predictions_total" in requests.get(metrics, timeout=60).text)
        assert "sage:predictions_total" in reader.types(see)
        said = reader.types(what_if)
        # Requests of the script, and those of the server's own start.
        found = re.search(r"log: (\d+) requests of.*^fcfs +[\d.]+ ", said, re.M | re.S)
        assert found is not None
        assert 80 <= int(found[1]) < 90
        switched = reader.types(switch)
        assert "60 answers" in switched
        assert re.findall(r'"schedule_policy": "(\w+)"', switched) == ["fcfs", "sage"]
