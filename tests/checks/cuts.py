"""Whether answers stay the same when prefills are cut: `python -m tests.checks.cuts`.

The same requests go to a stock server, and to one under qllm that cuts the prefills of best effort
between all layers, while latency-sensitive requests pass and decode in between. The model is a
Mixtral in single precision. Compared are token ids and log probabilities, beside what batching
alone changes: where two tokens are as likely to within that, either may be said, and an answer that
parts there is counted apart. Exit code 1 if an answer parts elsewhere, or a log probability differs
by more than the batch's size explains, 2 if the runs failed or too few cuts were made.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    PolicyServers,
    scheduler_state,
)
from bench.engines.server.server import ServerError
from sage_sched.best_effort import QllmParameters
from sage_sched.config import HintsConfig, SageConfig
from tests.checks.exactness import STRICT, Undisturbed, ask, crowd

_OUTPUT = Path("results/cuts")
_LAYERS, _EXPERTS = 8, 8
_AT_A_TIME = 24
# One layer a slice, whatever it takes. Two or three of the prompts are prefilled together.
_CUTTING = SageConfig(
    hints=HintsConfig(trust="body"), policy={"qllm": QllmParameters(slice_ms=1e-3)}
)
_WHOLE = ("--disable-overlap-schedule", "--chunked-prefill-size", "-1")
_FLAGS = ("--max-prefill-tokens", "64", "--max-total-tokens", "16384")
# In turn: two of best effort, one that passes them.
_SAMPLING: tuple[dict[str, object], ...] = ({}, {}, {"custom_params": {"urgency": 2}})


def measure(num_requests: int, least_cuts: int) -> int:
    """Both servers, one after the other, and what was found, printed; the exit code."""
    asked = crowd(num_requests)
    servers = PolicyServers(
        model=write_model(
            _OUTPUT / "model", num_layers=_LAYERS, hidden_size=64, num_experts=_EXPERTS
        ),
        folder=_OUTPUT,
        flags=(*CPU_ENGINE_FLAGS, *_FLAGS, *_WHOLE, "--max-running-requests", str(_AT_A_TIME)),
        env=CPU_ENV | STRICT,
        sage=_CUTTING,
    )
    with servers.server("fcfs", "whole") as server:
        whole = Undisturbed.ask(server, asked, _AT_A_TIME, "whole")
    with servers.server("qllm", "cut") as server:
        cut = ask(server, asked, _AT_A_TIME, "cut", _SAMPLING)
        counts = scheduler_state(server)["slices"]
    print(
        f"{len(asked)} requests, {sum(len(answer.ids) for answer in cut)} tokens; "
        f"{counts['num_prefills']} prefills cut {counts['num_cuts']} times, "
        f"{counts['num_passed']} requests passed"
    )

    agrees = whole.agrees_with(cut, "cut")
    if counts["num_cuts"] < least_cuts or not counts["num_passed"]:
        print("cuts: too few cuts for this to mean anything", file=sys.stderr)
        return 2
    return int(not agrees)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--least-cuts", type=int, default=500, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        return measure(args.num_requests, args.least_cuts)
    except ServerError as error:
        print(f"cuts: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
