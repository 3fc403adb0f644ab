"""The arms in which latency-sensitive (LS) and best-effort (BE) requests are compared, and their
load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.engines.simulator.presets import Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from sage_sched.best_effort import Qllm, QllmParameters
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import DEFAULT_URGENCY, Hints, Job
from sage_sched.plan import Budget
from sage_sched.policy import Policy
from sage_sched.view import SchedulerView

LS_SHARE = 0.2
LS_TOKENS, BE_TOKENS = (20, 60), (2_000, 3_500)
ANSWER_TOKENS, MAX_NEW_TOKENS = 32, 128
LS_URGENCY = 2
# Of every answer: no server knows that all have ANSWER_TOKENS.
FORESEEN = LengthDistribution.from_samples([16, 32, 64], "history")
WHOLE_TOKENS = 1 << 20  # a chunk that no prompt fills


class ByFirstChunk(Qllm):
    """qllm without newcomers between chunks, as in stock SGLang: who comes while a prompt is
    chunked waits for all of it."""

    moves = True

    def on_pass(self, view: SchedulerView) -> None:
        super().on_pass(view)
        self._chunked = view.chunked

    def key(self, job: Job, view: SchedulerView) -> float:
        is_held_back = self._chunked is not None and job is not self._chunked
        return math.inf if is_held_back else super().key(job, view)


class Algorithm1(Qllm):
    """Algorithm 1 of QLLM as printed: LS decodes if it fills the batch; else LS is prefilled, and
    BE with it; else LS decodes, and BE with it; else BE decodes; else BE is prefilled. BE waits for
    ever if need be."""

    def key(self, job: Job, view: SchedulerView) -> float:
        return 0.0 if self.passes(job) else 1.0

    def budget(self, view: SchedulerView) -> Budget | None:
        """Decode alone, or all that fits."""
        num_decoding = sum(self.passes(job) for job in view.running)
        is_filled = num_decoding >= view.server.max_running_requests
        if view.running and (is_filled or not any(self.passes(job) for job in view.waiting)):
            return Budget(prefill_tokens=0, reason="Algorithm 1")
        return None


@dataclass(frozen=True, slots=True)
class Arm:
    """label: of its row. policy: a name, or a class of policies. chunk_tokens, slices,
    prefill_tokens: of the engine. about: which step of the gain it is one of, "" for none."""

    label: str
    policy: str | type[Qllm]
    chunk_tokens: int = WHOLE_TOKENS
    slices: int = 1
    about: str = ""
    prefill_tokens: int = 16_384

    def engine(self, engine: Engine) -> Engine:
        """The engine that it runs on."""
        return replace(
            engine,
            chunked_prefill_size=self.chunk_tokens,
            max_prefill_tokens=self.prefill_tokens,
            slices=self.slices,
        )


def arms(num_layers: int, num_experts: int) -> list[Arm]:
    """(a) to (f), prompts prefilled one by one, finer slices, and Algorithm 1."""
    chunks = (256, 512, 1024)
    num_slices = num_layers * num_experts
    by_layer = [(f"{n} layer{'s'[: n > 1]}", "layers", num_layers // n) for n in (1, 2, 4)]
    cuts = [*by_layer, ("expert", "experts", num_slices)]
    return [
        Arm("a: `fcfs`", "fcfs", about="fcfs"),
        Arm("b: `qllm`, whole prefills", Qllm, about="order"),
        Arm("b: prompt by prompt", Qllm, about="prompts", prefill_tokens=1),
        *(Arm(f"c: chunks of {n} that nobody joins", ByFirstChunk, n) for n in chunks),
        *(Arm(f"d: chunks of {n}", Qllm, n, about="chunks") for n in chunks),
        *(Arm(f"e: cut by {of}", Qllm, slices=n, about=about) for of, about, n in cuts),
        *(
            Arm(
                f"e: cut by {of}, prompt by prompt",
                Qllm,
                slices=n,
                about=about,
                prefill_tokens=1,
            )
            for of, about, n in (by_layer[0], cuts[-1])
        ),
        *(
            Arm(f"f: `shortest-prefill-first`, chunks of {n}", "shortest-prefill-first", n)
            for n in chunks
        ),
        Arm("Algorithm 1 as printed", Algorithm1),
    ]


def mixed(
    rate: float, number: int, seed: int, *, ls_share: float = LS_SHARE, be_tokens: Sequence[int]
) -> list[SimRequest]:
    """Poisson arrivals of so many a second, each prompt its own. be_tokens: the fewest and most of
    a BE prompt."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, number))
    is_ls = rng.random(number) < ls_share
    spans = np.where(is_ls[:, np.newaxis], LS_TOKENS, be_tokens)
    input_tokens = rng.integers(spans[:, 0], spans[:, 1] + 1)
    return [
        SimRequest(
            arrival_s=float(at),
            input_tokens=int(num_in),
            output_tokens=ANSWER_TOKENS,
            max_new_tokens=MAX_NEW_TOKENS,
            distribution=FORESEEN,
            class_name="LS" if ls else "BE",
            hints=Hints(urgency=LS_URGENCY if ls else DEFAULT_URGENCY),
        )
        for at, num_in, ls in zip(arrivals_s, input_tokens, is_ls, strict=True)
    ]


def capacity(engine: Engine, number: int, be_tokens: Sequence[int]) -> float:
    """Requests a second that `fcfs`, its prefills whole, serves if all have come."""
    engine = replace(engine, chunked_prefill_size=WHOLE_TOKENS, slices=1)
    at_once = mixed(1e6, number, 0, be_tokens=be_tokens)
    return number / simulate(engine, "fcfs", SageConfig(), at_once, Options()).duration_s


def policy_of(arm: Arm, engine: Engine, level_pools: float) -> str | Policy:
    """What simulate() takes."""
    if isinstance(arm.policy, str):
        return arm.policy
    return arm.policy(QllmParameters(level_pools=level_pools), engine.server_facts())
