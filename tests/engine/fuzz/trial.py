"""One configuration's server under one scenario after another, until the first finding."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import requests

from bench.engines.server.server import Server
from tests.engine.fuzz import witness
from tests.engine.fuzz.actor import Actor
from tests.engine.fuzz.configurations import Configuration
from tests.engine.fuzz.judge import Oracle, judge
from tests.engine.fuzz.scenario import draw
from tests.engine.serving import generate, post, states, wait_until, warmed_store

# The time in which a server must notice that it is idle. SGLang looks for clients that left only
# every few seconds, for example. No host takes this long.
_SETTLE_S = 300
_DEATHS = ("Scheduler hit an exception", "Error:", "though", "Leak", "leak", "diverge")
# The log line of a scheduler that serves by arrival because its policy raised.
_FAILED = "the policy could not"


def calm_server(configuration: Configuration, model: Path, folder: Path) -> Server:
    """Return a stock server, not started yet, that rounds and allows the same as this
    configuration's."""
    log, env = folder / f"{configuration.name}-calm.log", configuration.environment()
    return Server(model, configuration.calm_flags(), log=log, env=env)


class Trial:
    """A fuzzed server, and the server with which its answers are compared.

    folder: for logs and settings. counts: totals over episodes, and the server's current counts.
    played_s: without starts and comparisons.
    """

    def __init__(
        self, configuration: Configuration, model: Path, folder: Path, oracle: Oracle
    ) -> None:
        self._configuration, self._model, self._oracle = configuration, model, oracle
        self._folder = folder / f"{configuration.name}-fuzzed"
        self.counts: Counter[str] = Counter()
        self.played_s = 0.0

    def __enter__(self) -> Self:
        configuration, folder = self._configuration, self._folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags = configuration.fuzzed_flags()
        if configuration.settings:
            store, config = warmed_store(folder / "store"), folder / "sage.toml"
            config.write_text(f'[store]\npath = "{store}"\n{configuration.settings}')
            flags += ["--sage-config", str(config)]
        env = {**configuration.environment(), **witness.install(folder / "plugin")}
        self._server = Server(self._model, flags, log=folder / "server.log", env=env).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.kill()

    def episode(self, seed: str) -> list[str]:
        """Play the scenario of a seed and return the findings. The first finding ends the trial."""
        started_s, configuration = time.monotonic(), self._configuration
        prefix = f"e{self.counts['episodes']:04d}"
        actor = Actor(self._server.url, str(self._model), configuration.policy, prefix)
        asyncio.run(actor.play(draw(seed, configuration.mix)))
        self.counts += Counter(episodes=1, requests=len(actor.played.outcomes))
        findings = self._death() or self._not_settled() + self._death()
        self.played_s += time.monotonic() - started_s
        if findings:
            return actor.played.problems + findings
        return self._counted_wrong() + judge(actor.played, self._oracle, self.counts)

    def _not_settled(self) -> list[str]:
        """Return the reasons why the server is not idle, or still holds memory."""
        left: list[str] = []

        def is_empty() -> bool:
            left[:] = [
                f"at the end {name} is {held}"
                for state in states(self._server)
                for name, held in state["witness"].items()
                if held and name != "aborts_met"
            ]
            return not left

        try:
            post(self._server, f"/flush_cache?timeout={_SETTLE_S}")
            # A server releases its newest batch with the next one.
            generate(self._server, None, 2, input_ids=[9, 8, 7])
            wait_until(is_empty, _SETTLE_S)  # answers are sent before their batch is released
        except TimeoutError:
            return left
        except requests.RequestException as error:
            return [f"at the end the server is not idle, or does not answer: {error!r}"]
        return []

    def _counted_wrong(self) -> list[str]:
        """Check that each preempted request came back, was recomputed, or was aborted, and that the
        policy did not fail."""
        now: Counter[str] = Counter()
        for state in states(self._server):
            counters: dict[str, Any] = state.get("sage", {}).get("preemption") or {}
            now.update({name: n for name, n in counters.items() if isinstance(n, int)})
            now.update({f"aborted {name}": n for name, n in state["witness"]["aborts_met"].items()})
        self.counts |= now
        ended = ("num_resumed", "num_recomputed", "num_left_in_tree", "aborted swapped")
        found = []
        if "num_preemptions" in now and now["num_preemptions"] != sum(now[name] for name in ended):
            found.append(f"not all preempted requests came back: {dict(now)}")
        if _FAILED in self._log():
            found.append("a policy failed, see the server's log")
        return found

    def _log(self) -> str:
        return self._server.log.read_text(errors="replace")

    def _death(self) -> list[str]:
        """Return errors from the server's log if it died."""
        for _ in range(20):  # the launcher ends some time after its scheduler
            text = self._log()
            if not self._server.running() or "hit an exception" in text:
                lines = [line for line in text.splitlines() if any(d in line for d in _DEATHS)]
                return ["the server died:\n    " + "\n    ".join(lines[:6])]
            try:
                if requests.get(f"{self._server.url}/health", timeout=30).ok:
                    return []
            except requests.RequestException:
                pass
            time.sleep(0.5)
        return []
