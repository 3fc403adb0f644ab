"""One configuration's server under scenario after scenario, until something is found."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from bench.engines.server.server import Server
from tests.engine.fuzz import witness
from tests.engine.fuzz.actor import Actor, Played, StalledError
from tests.engine.fuzz.configurations import Configuration
from tests.engine.fuzz.evidence import Evidence
from tests.engine.fuzz.judge import judge
from tests.engine.fuzz.oracle import Oracle, pause, resume
from tests.engine.fuzz.scenario import draw
from tests.engine.serving import post, states, wait_until, warmed_store

# How long an idle server may take to notice that it is: a client that left, for one, is looked for
# every few seconds.
_SETTLE_S = 60
# A busy host may take minutes.
START_TIMEOUT_S = 600.0
_DEATHS = ("Scheduler hit an exception", "Error:", "though", "Leak", "leak", "diverge")
# The log line of a scheduler that serves by arrival because its policy raised.
_FAILED = "the policy could not"
# What an idle server has nothing of.
_HELD = (
    "waiting", "running", "copies", "locked_tokens", "missing_tokens", "missing_slots", "open",
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """Totals over episodes. played_s: without starts and comparisons. preemption: counters of the
    present server."""

    played_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    states_met: Counter[str] = field(default_factory=Counter)
    preemption: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.played_s / 60:.1f} minutes, {dict(self.counts)}, "
            f"aborts met {dict(self.states_met)}, {dict(self.preemption)}"
        )


def calm_server(configuration: Configuration, model: Path, folder: Path) -> Server:
    """A stock server, not started yet, that rounds and allows what this configuration's does."""
    return Server(
        model,
        configuration.calm_flags(),
        log=folder / f"{configuration.name}-calm.log",
        env=configuration.environment(),
        start_timeout_s=START_TIMEOUT_S,
    )


class Trial:
    """A fuzzed server, started for the first episode, and the server with which its answers are
    compared.

    folder: for logs, settings, and what the witnesses write.
    """

    def __init__(
        self, configuration: Configuration, model: Path, folder: Path, oracle: Oracle
    ) -> None:
        self._configuration, self._model = configuration, model
        self._folder, self._oracle = folder, oracle
        self._running: tuple[Server, Path] | None = None  # and its witnesses' folder
        self._num_started = 0
        self._reported: set[str] = set()
        self.tally = Tally()

    def stop(self) -> None:
        """Ends the fuzzed server; the next episode starts another."""
        if self._running is not None:
            self._running[0].kill()
            self._running = None

    def episode(self, seed: str) -> list[str]:
        """Play the scenario of a seed and return the findings."""
        server, witnesses = self._running or self._start()
        started_s = time.monotonic()
        played, stalls = self._play(server, seed)
        findings, ended = list[str](), stalls + _death(server)
        if not ended:
            findings = self._not_settled(server)
            ended = _death(server)
        findings += ended
        self.tally.played_s += time.monotonic() - started_s
        evidence = Evidence(witnesses)
        findings += evidence.findings()
        self.tally.states_met = evidence.states_met()
        if ended:
            self.stop()
        else:
            findings += self._counted_wrong()
            if _FAILED in server.log.read_text(errors="replace"):
                findings.append("a policy failed, see the server's log")
            pause(server)
            verdict = judge(played, self._oracle)
            resume(server)
            self.tally.counts += verdict.counts
            findings += verdict.findings
        # Witnesses repeat their findings after each episode.
        new = [found for found in findings if found not in self._reported]
        self._reported |= set(new)
        return new

    def _play(self, server: Server, seed: str) -> tuple[Played, list[str]]:
        """And whether the server stalled."""
        prefix = f"e{self.tally.counts['episodes']:04d}"
        policy = self._configuration.policy
        actor = Actor(server.url, str(self._model), policy, prefix)
        stalls = []
        try:
            asyncio.run(actor.play(draw(seed, self._configuration.mix)))
        except StalledError as error:
            stalls.append(f"stalled: {error}")
        self.tally.counts += Counter(episodes=1, requests=len(actor.played.outcomes))
        return actor.played, stalls

    def _start(self) -> tuple[Server, Path]:
        configuration = self._configuration
        self._num_started += 1
        folder = self._folder / f"{configuration.name}-fuzzed{self._num_started}"
        shutil.rmtree(folder, ignore_errors=True)
        witnesses = folder / "witness"
        witnesses.mkdir(parents=True)
        flags = configuration.fuzzed_flags()
        if configuration.settings:
            store, config = warmed_store(folder / "store"), folder / "sage.toml"
            config.write_text(f'[store]\npath = "{store}"\n{configuration.settings}')
            flags += ["--sage-config", str(config)]
        server = Server(
            self._model,
            flags,
            log=folder / "server.log",
            env={**configuration.environment(), **witness.install(witnesses)},
            start_timeout_s=START_TIMEOUT_S,
        )
        self._running = server.__enter__(), witnesses
        return self._running

    def _not_settled(self, server: Server) -> list[str]:
        """What keeps a server from being idle, or what it holds once it is."""
        left: list[str] = []

        def is_empty() -> bool:
            left[:] = [
                f"at the end {name} is {state['witness'][name]}"
                for state in self._states(server)
                for name in _HELD
                if state["witness"][name]
            ]
            return not left

        try:
            post(server, f"/flush_cache?timeout={_SETTLE_S}")
            # The newest batch of a server is let go with the next.
            sampling = {"max_new_tokens": 2}
            post(server, "/generate", {"input_ids": [9, 8, 7], "sampling_params": sampling})
            wait_until(is_empty, _SETTLE_S)  # an answer is sent before its batch is let go
        except TimeoutError:
            return left
        except requests.RequestException as error:
            return [f"at the end the server is not idle, or does not answer: {error!r}"]
        return []

    def _states(self, server: Server) -> list[dict[str, Any]]:
        found = states(server)
        self.tally.preemption = Counter()
        for state in found:
            counters = state.get("sage", {}).get("preemption") or {}
            self.tally.preemption.update(
                {name: n for name, n in counters.items() if isinstance(n, int)}
            )
        return found

    def _counted_wrong(self) -> list[str]:
        """Check that each preempted request came back, was recomputed, or was aborted."""
        found = self.tally.preemption
        names = ("num_resumed", "num_recomputed", "num_left_in_tree")
        num_aborted = self.tally.states_met["swapped"] if found else 0
        if found["num_preemptions"] == sum(found[name] for name in names) + num_aborted:
            return []
        return [f"{dict(found)}, and {num_aborted} aborted while swapped"]


def _death(server: Server) -> list[str]:
    """How the server died, if it did."""
    for _ in range(20):  # a scheduler that died takes the launcher along, in a while
        text = server.log.read_text(errors="replace")
        if not server.running() or "hit an exception" in text:
            lines = [line for line in text.splitlines() if any(d in line for d in _DEATHS)]
            return ["the server died:\n    " + "\n    ".join(lines[:6])]
        try:
            if requests.get(f"{server.url}/health", timeout=30).ok:
                return []
        except requests.RequestException:
            pass
        time.sleep(0.5)
    return []
