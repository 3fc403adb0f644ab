"""Serves an arm's requests on real servers: on a device clock, or at the host's speed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.engines.baseline import PILOT_REQUESTS, Saturation, UnloadedTime, sustained
from bench.engines.clock.device import Device
from bench.engines.server.client import Answer, as_seen, body_of, drive, problem_of
from bench.engines.server.facts import host_facts
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    COMMON_FLAGS,
    CPU_MODEL,
    PolicyServers,
    servers_in,
)
from bench.engines.server.server import ServerError
from bench.experiment.simulated import Loaded
from bench.experiment.spec import Experiment, Options
from bench.policies.arm import Arm
from bench.policies.rival import by_arrival
from bench.simulator.request import SimRequest
from bench.simulator.result import Served, alone_s
from bench.workloads.prompts import WorkloadError, sample
from bench.workloads.source import Draw, Purpose
from predictor_store.data.warm import Observation
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names
from sage_sched.fields import ConfigError
from sage_sched.job import CLIENTS_HINTS, NO_HINTS

# A run that measures the capacity: seconds of arrivals, and the minimum and maximum of its
# requests.
_CAPACITY_S = 1200.0
_CAPACITY_REQUESTS = (PILOT_REQUESTS, 1500)
_CAPACITY_SEED = 1
_VOCABULARY = 16384
# Token ids below this are reserved for special tokens.
_FIRST_TOKEN_ID = 1000
# The client gets every 16th token, because streaming each one costs a small host more than
# decoding. At real speed or slower it gets every token.
_STREAM_INTERVAL = 16


@dataclass(frozen=True, slots=True)
class Ran:
    """A run on a server. served: None if it must not be counted; problem gives the reason."""

    served: Served | None
    problem: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


class Servers:
    """Real servers of one load, one at a time.

    On a bare host every run has a server of its own. On a device clock an arm's server stays for
    all its runs. Prompts are predicted from a history that is the same for every run; requests
    without text all have the same prediction.
    """

    def __init__(
        self, experiment: Experiment, loaded: Loaded, options: Options, num_tries: int = 3
    ) -> None:
        """Check the arms. Raises ConfigError if servers cannot differ as the arms do.

        num_tries: see KeptServer.
        """
        self._loaded, self._load, self._options = loaded, loaded.load, options
        self._workload = loaded.source.workload
        self._arms = experiment.arms
        self._on_clock = experiment.engine == "clock"
        self._speed = experiment.speed if self._on_clock else 1.0
        self._folder = options.output / experiment.name
        self._kept: tuple[Arm, KeptServer] | None = None
        self._num_tries = num_tries
        self._warmed: object = None
        self._unloaded: UnloadedTime | None = None
        if not self._on_clock and self._workload is None:
            raise ConfigError(f"load {self._load.name} has no prompts, allowed engines: sim, clock")
        for arm in experiment.arms:
            self._check(arm)

    def _check(self, arm: Arm) -> None:
        same = Arm(policy=arm.policy, label=arm.label, settings=arm.settings)
        if self._on_clock:
            same = replace(same, engine=arm.engine)
        if self._workload is None:
            same = replace(same, said_by=arm.said_by)
        if arm != same or self._load.nodes > 1:
            raise ConfigError(
                f"load {self._load.name}: servers cannot differ as {arm.name} does, "
                "allowed engine: sim"
            )

    def close(self) -> None:
        """End the server."""
        if self._kept is not None:
            self._kept[1].close()
        self._kept = None

    def set_speed(self, speed: float) -> None:
        """Run the device clock at this speed. Another speed needs new servers."""
        if speed != self._speed:
            self.close()
        self._speed = speed

    def run(self, arm: Arm, seed: int) -> Ran:
        """Serve the requests of a seed, the same for all arms. Raises WorkloadError."""
        loaded, load = self._loaded, self._load
        arrivals_s = loaded.arrivals_s(seed)
        asked = loaded.source.for_servers(Draw(arm, arrivals_s, seed, load.max_new_tokens))
        if self._workload and len(asked) < len(arrivals_s) and load.arrivals != "sustained":
            needed = f"{len(arrivals_s)} prompts, the workload has {len(asked)}"
            raise WorkloadError(f"a run needs {needed}")
        return self._serve(arm, asked, f"{arm.name} {load.name} seed {seed}")

    def sustained(self) -> Saturation:
        """Measure the rate that capacity_by sustains, with requests of the history. Raises
        ServerError.

        Prompts are repeated if the history has too few. Their prefill is then cheaper.
        """
        load = self._load
        named = (arm for arm in self._arms if arm.policy == load.capacity_by)
        arm = next(named, Arm(policy=load.capacity_by))
        if (policy := by_arrival(arm.policy)) != arm.policy:
            arm = replace(arm, policy=policy, label="")

        def serve(arrivals_s: NDArray[np.float64]) -> Served:
            cap = load.max_new_tokens
            draw = Draw(arm, arrivals_s, _CAPACITY_SEED, cap, Purpose.CAPACITY)
            asked = self._loaded.source.for_servers(draw)
            tqdm.write(
                f"measuring what {arm.name} sustains: {len(asked)} requests arrive within "
                f"{arrivals_s[-1]:.0f} s",
                file=sys.stderr,
            )
            ran = self._serve(arm, asked, "capacity")
            if ran.served is None:
                raise ServerError(f"the capacity could not be measured: {ran.problem}")
            return ran.served

        most = _CAPACITY_REQUESTS
        found = sustained(serve, lambda rate: int(np.clip(rate * _CAPACITY_S, *most)))
        tqdm.write(f"{arm.name} sustains {found.capacity:.2f} requests/s", file=sys.stderr)
        return found

    def _serve(self, arm: Arm, requests: Sequence[SimRequest], label: str) -> Ran:
        if self._kept is None or self._kept[0] != arm:
            self.close()
            self._kept = arm, KeptServer(self.servers_of(arm), arm.policy, self._num_tries)
        kept = self._kept[1]
        try:
            run = kept.run(
                label, lambda url: self._send(url, requests, label), prepare=self._prepare
            )
        except ServerError as error:
            self.close()
            return Ran(None, str(error))
        about = {"counters": run.counters, "device": None if run.use is None else asdict(run.use)}
        if problem := problem_of(run.answers) or run.late:
            return Ran(None, problem, about)
        if self._workload is not None:  # a server counts the tokens of a prompt
            requests = [
                replace(r, input_tokens=answer.input_tokens, output_tokens=answer.output_tokens)
                for r, answer in zip(requests, run.answers, strict=True)
            ]
        served = as_seen(self._alone_s(arm), requests, run.answers)
        facts = {**self._facts(kept.servers), "unloaded TTLT": self._description}
        return Ran(served, "", {**about, "settings": facts, "requests": columns(served)})

    def _send(self, url: str, requests: Sequence[SimRequest], label: str) -> list[Answer]:
        return drive(
            url,
            [self._body(number, request) for number, request in enumerate(requests)],
            [request.arrival_s for request in requests],
            label=label,
            speed=self._speed,
            follows=[request.follows for request in requests],
            pauses_s=[request.pause_s for request in requests],
        )

    def _body(self, number: int, request: SimRequest) -> dict[str, Any]:
        hints, cap = request.hints, request.max_new_tokens
        prompt: str | list[int] = request.prompt
        if not prompt:
            spans = request.spans or ((-1 - number, 0, request.input_tokens),)
            parts = [_tokens(stream, end)[first:] for stream, first, end in spans]
            prompt = np.concatenate(parts).tolist()
        given = {name: getattr(hints, name) for name in CLIENTS_HINTS}
        said = {
            name: value / self._speed if name.endswith("_ms") else value
            for name, value in given.items()
            if value != getattr(NO_HINTS, name)
        }
        if (part := request.batch) is not None:
            done_in_s = (request.arrival_s + part.done_in_s) / self._speed
            said |= {"batch": part.name, "batch_size": part.num_requests}
            said["done_by"] = time.time() + done_in_s
        body = body_of(prompt, request.output_tokens, cap, **said)
        return body | {"priority": self._loaded.source.priority_of(request)}

    def servers_of(self, arm: Arm) -> PolicyServers:
        """Return the servers of an arm, with its history filled."""
        load, source, options = self._load, self._loaded.source, self._options
        device = None
        if self._on_clock:
            device = Device(load.preset, self._speed, load.engine_of(arm))
        trusting = {"slo": asdict(source.slo()), "hints": {"trust": "body"}}
        sage = SageConfig.parse({**trusting, **arm.settings})
        model, flags = options.model, options.server_flags
        if self._workload is None:
            pool_tokens = load.engine_of(arm).kv_pool_tokens
            shape = {**CPU_MODEL, "vocab_size": _VOCABULARY, "context_length": pool_tokens}
            model = write_model(self._folder / "model", **shape)
            flags = ("--stream-interval", str(_STREAM_INTERVAL if self._speed > 1 else 1))
        env = options.server_env
        servers = servers_in(self._folder, sage, device, model=model, flags=flags, env=env)
        if arm.policy in policy_names() and self._warmed != (sage.store, sage.predictor.encoder):
            tqdm.write("filling the predictor's history", file=sys.stderr)
            servers.warm(self._observations())
            self._warmed = sage.store, sage.predictor.encoder
        return servers

    def _observations(self) -> list[Observation]:
        if self._workload is not None:
            return self._workload.observations()
        lengths = self._loaded.source.all_answers().lengths.tolist()
        return [Observation(f"step {i}", n) for i, n in enumerate(lengths)]

    def _prepare(self, url: str) -> None:
        """Warm a server up. The first server without a device clock also answers single requests,
        to measure their times."""
        if self._workload is None:
            return
        history = self._workload.history
        drawn = sample(history, 24, seed=0)
        shortest = sorted(drawn, key=lambda request: request.output_tokens)[:8]
        self._ask(url, [(request.prompt, request.output_tokens) for request in shortest])
        if not self._on_clock and self._unloaded is None:
            drawn = sample(history, PILOT_REQUESTS, seed=1)
            prompts = sorted((request.prompt for request in drawn), key=len)
            probes = [
                (prompts[len(prompts) * tenths // 10], output_tokens)
                for output_tokens in (16, 64, 256)
                for tenths in (1, 9)
            ]
            alone = [self._ask(url, [probe])[0] for probe in probes]
            if problem := problem_of(alone):
                raise ServerError(problem)
            self._unloaded = UnloadedTime.fitted(alone)

    def _ask(self, url: str, probes: Sequence[tuple[str, int]]) -> list[Answer]:
        cap = self._load.max_new_tokens
        bodies = [body_of(prompt, output_tokens, cap) for prompt, output_tokens in probes]
        return drive(url, bodies, [0.0] * len(bodies), label="warming up", speed=self._speed)

    def _alone_s(self, arm: Arm) -> Callable[[int, int], float]:
        if self._unloaded is not None:
            return self._unloaded.seconds
        return partial(alone_s, self._load.engine_of(arm))

    @property
    def _description(self) -> str:
        if self._unloaded is not None:
            return self._unloaded.description
        return f"by the step times of {self._load.preset}"

    def _facts(self, servers: PolicyServers) -> dict[str, Any]:
        """Return the facts on which the figures of a run rest."""
        load, workload = self._load, self._workload
        clock = {"device clock": load.preset, "speed": self._speed} if self._on_clock else {}
        return {
            **clock,
            **host_facts(),
            "workload": load.workload["name"] if workload is None else workload.description,
            "arrivals": load.arrivals,
            "rate": f"{self._loaded.rate_per_s:.4g} requests/s",
            "max_new_tokens": load.max_new_tokens,
            "model": _shape(servers.model),
            "server flags": " ".join((*servers.flags, *COMMON_FLAGS)),
            "server environment": dict(servers.env),
            "sage": servers.sage.sections(),
        }


def columns(served: Served) -> dict[str, list[Any]]:
    """Return the columns of each request that reports draw, without its prompt."""
    return {
        "class": served.class_names.tolist(),
        "input_tokens": served.input_tokens.tolist(),
        "output_tokens": served.answer_tokens.tolist(),
        "sent_ms": np.rint(served.arrival_s * 1e3).astype(int).tolist(),
        "ttft_ms": np.rint(served.ttft_s * 1e3).astype(int).tolist(),
        "e2e_latency_ms": np.rint(served.ttlt_s * 1e3).astype(int).tolist(),
        "pauses_s": [[*map(list, pauses)] for pauses in served.pauses_s],
    }


def _shape(model: Path) -> str:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    numbers = ", ".join(f"{field} {config.get(field)}" for field in (*fields, "vocab_size"))
    return f"{config['architectures'][0]} ({numbers})"


def _tokens(stream: int, num_tokens: int) -> np.ndarray:
    """Return the first tokens of a stream. A longer request extends the same tokens."""
    generator = np.random.default_rng(abs(stream) * 2 + (stream < 0))
    return generator.integers(_FIRST_TOKEN_ID, _VOCABULARY, num_tokens)
