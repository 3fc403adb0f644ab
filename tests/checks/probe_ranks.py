"""Whether two ranks go by the same scores of a probe: `python -m tests.checks.probe_ranks`.

A server of ours with tensor parallelism of 2 runs with SGLang's own checker on, which compares what
the ranks do in every pass and ends the server if they differ. Its policy is trail, which takes
scores at every token: a running request yields to whoever has less left by them. Its probe is
noise, so that requests change places all the time, and its pool so small that they yield. It is
asked until 500 requests have yielded. Exit code 1 if a request failed, as all do once the checker
has ended the server, 2 if the server did not start or too few yielded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    PolicyServers,
    scheduler_state,
)
from bench.engines.server.server import ServerError
from predictor_store.data.warm import Observation
from predictor_store.probe.file import ProbeFile, fingerprint
from sage_sched.app.config import ProbeConfig, SageConfig, StepTimeConfig
from tests.checks.exactness import STRICT, TWO_RANKS, ask, crowd

_OUTPUT = Path("results/probe-ranks")
_HIDDEN_SIZE, _INNER = 128, 16
# So that nearly all goes to one bin, now one and now another.
_SURE = 20.0
# Of what is left, in tokens: ten bins, as the paper has them.
_EDGES = np.arange(0, 81, 8)
# Requests a round, of which a few hundred yield.
_ROUND, _AT_A_TIME = 150, 64
_MAX_ROUNDS = 20
_STARVED = ("--max-total-tokens", "640", "--max-running-requests", "6", "--tp-size", "2")


def noise(model: Path, seed: int = 0) -> ProbeFile:
    """A probe that says anything at all, and is sure of it."""
    rng, bins = np.random.default_rng(seed), _EDGES.size - 1
    return ProbeFile(
        w1=rng.normal(size=(_INNER, _HIDDEN_SIZE)).astype(np.float32),
        b1=np.zeros(_INNER, np.float32),
        w2=(_SURE * rng.normal(size=(bins, _INNER))).astype(np.float32),
        b2=np.zeros(bins, np.float32),
        layer=0,
        fingerprint=fingerprint(model),
        edges=_EDGES,
    )


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--yields", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=_OUTPUT, metavar="DIR")
    args = parser.parse_args(argv)
    model = write_model(args.output / "model", hidden_size=_HIDDEN_SIZE)
    probe = args.output / "probe.safetensors"
    noise(model).write(probe)
    servers = PolicyServers(
        model=model,
        folder=args.output,
        flags=(*CPU_ENGINE_FLAGS, *_STARVED),
        env=CPU_ENV | STRICT | TWO_RANKS,
        sage=SageConfig(
            probe=ProbeConfig(file=str(probe.absolute())),
            # Known, so that no request is ranked anew because steps were learned.
            step_time=StepTimeConfig(),
        ),
    )
    servers.warm([Observation(prompt, num_tokens) for prompt, num_tokens in crowd(200, seed=99)])
    asked = failed = num_preemptions = 0
    try:
        with servers.server("trail", "ranks") as server:
            for seed in range(_MAX_ROUNDS):
                asked_now = crowd(_ROUND, seed)
                try:
                    answers = ask(server, asked_now, _AT_A_TIME, f"{num_preemptions} yields so far")
                except ServerError as error:
                    print(f"probe_ranks: {error}", file=sys.stderr)
                    return 1
                asked += len(answers)
                failed += sum(
                    len(answer.ids) != num_tokens
                    for answer, (_, num_tokens) in zip(answers, asked_now, strict=True)
                )
                state = scheduler_state(server)
                num_preemptions = state["preemption"]["num_preemptions"]
                print(f"{asked} requests, {num_preemptions} yields", flush=True)
                if num_preemptions >= args.yields:
                    break
    except ServerError as error:
        print(f"probe_ranks: {error}", file=sys.stderr)
        return 2
    print(
        f"{asked} requests, {failed} of another length; {num_preemptions} yields, "
        f"{state['probe']['num_scores']} scores, {state['num_policy_errors']} policy errors"
    )
    if num_preemptions < args.yields or not state["probe"]["num_scores"]:
        print("probe_ranks: too few yields for this to mean anything", file=sys.stderr)
        return 2
    return int(failed > 0 or state["num_policy_errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())
