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
from tests.engine.fuzz.judge import Verdict, judge
from tests.engine.fuzz.oracle import Oracle, pause, resume
from tests.engine.fuzz.scenario import draw
from tests.engine.serving import warmed_store

# How long an idle server may take to notice that it is: a client that left, for one, is looked for
# every few seconds.
_SETTLE_S = 60
# A busy host may take minutes.
START_TIMEOUT_S = 600.0
_DEATHS = ("Scheduler hit an exception", "Error:", "though", "Leak", "leak", "diverge")

# The log line of a scheduler that serves by arrival because its policy raised.
FAILED = "the policy could not"


@dataclass(slots=True)
class Tally:
    """Totals over episodes. counters: of preemption, from the present server."""

    played_s: float = 0.0  # without starts and comparisons
    num_episodes: int = 0
    num_requests: int = 0
    num_compared: int = 0
    num_uncertain: int = 0
    num_aborted: int = 0
    num_left: int = 0
    states_met: Counter[str] = field(default_factory=Counter)
    counters: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        yields = {
            name: self.counters[name]
            for name in ("num_preemptions", "num_resumed", "num_left_in_tree", "num_recomputed")
            if name in self.counters
        }
        return (
            f"{self.played_s / 60:.1f} minutes, {self.num_episodes} episodes, "
            f"{self.num_requests} requests, "
            f"{self.num_compared} answers compared, {self.num_uncertain} uncertain, "
            f"{self.num_aborted} aborted, {self.num_left} left, "
            f"aborts met {dict(self.states_met)}, {yields}"
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
        self._configuration = configuration
        self._model = model
        self._folder = folder
        self._oracle = oracle
        self._server: Server | None = None
        self._num_started = 0
        self._reported: set[str] = set()
        self.tally = Tally()

    def stop(self) -> None:
        """Ends the fuzzed server; the next episode starts another."""
        if self._server is not None:
            self._server.kill()
            self._server = None

    def episode(self, seed: str) -> list[str]:
        """Play the scenario of a seed and return the findings."""
        if self._server is None:
            self._start()
        assert self._server is not None
        scenario = draw(seed, self._configuration.mix)
        prefix = f"e{self.tally.num_episodes:04d}"
        policy = self._configuration.policy
        actor = Actor(self._server.url, str(self._model), policy, prefix)
        findings: list[str] = []
        stalled = False
        started_s = time.monotonic()
        try:
            asyncio.run(actor.play(scenario))
        except StalledError as error:
            stalled = True
            findings.append(f"stalled: {error}")
        played = actor.played
        self._count(played)
        death = self._death()
        if death is None and not stalled:
            findings += self._settle()
            death = self._death()
        findings += [death] if death is not None else []
        self.tally.played_s += time.monotonic() - started_s
        evidence = Evidence(self._witnesses)
        findings += evidence.findings()
        self.tally.states_met = evidence.states_met()
        if death is None and not stalled:
            findings += self._counted_wrong(evidence)
            if FAILED in self._server.log.read_text(errors="replace"):
                findings.append("a policy failed, see the server's log")
            pause(self._server)
            verdict = judge(played, self._oracle, evidence.lost_kv())
            resume(self._server)
            self._add(verdict)
            findings += verdict.findings
        if death is not None or stalled:
            self.stop()
        # Witnesses repeat their findings after each episode.
        new = [found for found in findings if found not in self._reported]
        self._reported |= set(new)
        return new

    def _fresh(self, name: str) -> Path:
        folder = self._folder / f"{self._configuration.name}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _start(self) -> None:
        configuration = self._configuration
        self._num_started += 1
        folder = self._fresh(f"fuzzed{self._num_started}")
        flags = configuration.fuzzed_flags()
        if configuration.settings:
            store = warmed_store(folder / "store")
            config = folder / "sage.toml"
            config.write_text(f'[store]\npath = "{store}"\n{configuration.settings}')
            flags += ["--sage-config", str(config)]
        self._witnesses = folder / "witness"
        self._witnesses.mkdir()
        server = Server(
            self._model,
            flags,
            log=folder / "server.log",
            env={**configuration.environment(), **witness.install(self._witnesses)},
            start_timeout_s=START_TIMEOUT_S,
        )
        self._server = server.__enter__()

    def _death(self) -> str | None:
        assert self._server is not None
        for _ in range(20):  # a scheduler that died takes the launcher along, in a while
            text = self._server.log.read_text(errors="replace")
            crashed = "hit an exception" in text
            if not self._server.running() or crashed:
                lines = [line for line in text.splitlines() if any(d in line for d in _DEATHS)]
                return "the server died:\n    " + "\n    ".join(lines[:6])
            if self._answers():
                return None
            time.sleep(0.5)
        return None

    def _answers(self) -> bool:
        assert self._server is not None
        try:
            return requests.get(f"{self._server.url}/health", timeout=30).ok
        except requests.RequestException:
            return False

    def _settle(self) -> list[str]:
        """Wait until the server is idle, and check that it holds nothing."""
        assert self._server is not None
        url = f"{self._server.url}/flush_cache?timeout={_SETTLE_S}"
        try:
            flushed = requests.post(url, timeout=_SETTLE_S + 60)
            if not flushed.ok:
                return [f"not idle after {_SETTLE_S} s: {flushed.text[:200]}; {self._states()}"]
            # The newest batch of a server is let go with the next.
            requests.post(
                f"{self._server.url}/generate",
                json={"input_ids": [9, 8, 7], "sampling_params": {"max_new_tokens": 2}},
                timeout=120,
            ).raise_for_status()
            ends = time.monotonic() + _SETTLE_S
            while (left := self._left_over()) and time.monotonic() < ends:
                time.sleep(0.5)  # an answer is sent a moment before its batch is let go
        except requests.RequestException as error:
            return [f"at the end the server does not answer: {error!r}"]
        return left

    def _left_over(self) -> list[str]:
        """Findings of an idle server that still holds something."""
        return [
            f"at the end {name} is {state['witness'][name]}"
            for state in self._states()
            for name in (
                "waiting", "running", "copies", "locked_tokens", "missing_tokens", "missing_slots",
                "open",
            )
            if state["witness"][name]
        ]  # fmt: skip

    def _states(self) -> list[dict[str, Any]]:
        assert self._server is not None
        info = requests.get(f"{self._server.url}/server_info", timeout=120).json()
        states: list[dict[str, Any]] = info["internal_states"]
        counters: Counter[str] = Counter()
        for state in states:
            found = state.get("sage", {}).get("preemption") or {}
            counters.update({name: n for name, n in found.items() if isinstance(n, int)})
        self.tally.counters = dict(counters)
        return states

    def _counted_wrong(self, evidence: Evidence) -> list[str]:
        """Check that each preempted request came back, was recomputed, or was aborted."""
        found = self.tally.counters
        if not found:
            return []
        names = ("num_resumed", "num_recomputed", "num_left_in_tree")
        accounted = sum(found.get(name, 0) for name in names)
        aborted = evidence.states_met()["swapped"]
        if found["num_preemptions"] == accounted + aborted:
            return []
        return [
            f"{found['num_preemptions']} yields, but {found}, and {aborted} aborted while swapped"
        ]

    def _count(self, played: Played) -> None:
        self.tally.num_episodes += 1
        self.tally.num_requests += len(played.outcomes)

    def _add(self, verdict: Verdict) -> None:
        self.tally.num_compared += verdict.num_compared
        self.tally.num_uncertain += verdict.num_uncertain
        self.tally.num_aborted += verdict.num_aborted
        self.tally.num_left += verdict.num_left
