"""What short requests wait for behind long prompts: `python -m bench.comparison.newcomers`.

A tenth of the prompts is much longer than a chunk (--chunk). In stock SGLang a chunked prompt takes
each chunk whole, so that whoever comes meanwhile waits for all of it. Answers are foreseen alike.
In the simulator, and with `--on-servers` on a device clock too; there at its own speed, as a short
request's time to first token is of the order of what the host itself takes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.comparison.session_bodies import Serve, served, session_servers, simulated
from bench.comparison.stats import with_interval
from bench.engines.clock.device import Device
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.server import ServerError
from bench.engines.server.session_client import Times
from bench.engines.simulator.presets import PRESETS
from bench.engines.simulator.request import SimRequest
from sage_sched.distribution import LengthDistribution

LONG_SHARE = 0.1
_SHORT_TOKENS, _LONG_TOKENS = (20, 200), (2_000, 3_500)
_MEDIAN_ANSWER_TOKENS, _SPREAD_OF_LOG, _MAX_NEW_TOKENS = 100, 0.8, 1_024
_COLUMNS = ("p99 TTFT, short, s", "p99 TTFT, long, s", "mean TTLT, s", "tokens/s")


def newcomers(rate: float, number: int, seed: int) -> list[SimRequest]:
    """Poisson arrivals of so many a second, each prompt its own."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, number))
    is_long = rng.random(number) < LONG_SHARE
    spans = np.where(is_long[:, np.newaxis], _LONG_TOKENS, _SHORT_TOKENS)
    input_tokens = rng.integers(spans[:, 0], spans[:, 1] + 1)
    output_tokens = _answers(rng, number)
    foreseen = all_answers()
    return [
        SimRequest(
            arrival_s=float(at),
            input_tokens=int(num_in),
            output_tokens=int(num_out),
            max_new_tokens=_MAX_NEW_TOKENS,
            distribution=foreseen,
            class_name="long" if long else "short",
        )
        for at, num_in, num_out, long in zip(
            arrivals_s, input_tokens, output_tokens, is_long, strict=True
        )
    ]


def all_answers() -> LengthDistribution:
    """What is foreseen of each answer."""
    return LengthDistribution.from_samples(_answers(np.random.default_rng(0), 200), "history")


def _answers(rng: np.random.Generator, number: int) -> NDArray[np.int64]:
    lengths = rng.lognormal(np.log(_MEDIAN_ANSWER_TOKENS), _SPREAD_OF_LOG, number)
    return np.clip(np.rint(lengths), 1, _MAX_NEW_TOKENS).astype(np.int64)


def _row(requests: Sequence[SimRequest], times: Sequence[Times]) -> list[float]:
    """By _COLUMNS."""
    ttft_s = np.array([each.first_token_s - each.arrival_s for each in times])
    is_long = np.array([request.class_name == "long" for request in requests])
    lasted_s = max(each.last_token_s for each in times)
    return [
        float(np.percentile(ttft_s[~is_long], 99)),
        float(np.percentile(ttft_s[is_long], 99)),
        float(np.mean([each.last_token_s - each.arrival_s for each in times])),
        sum(request.output_tokens for request in requests) / lasted_s,
    ]


def _compare(args: argparse.Namespace) -> None:
    engine = replace(PRESETS[args.preset], chunked_prefill_size=args.chunk)
    print(f"| {args.rate:g} requests/s | {' | '.join(_COLUMNS)} |\n|{'---|' * 5}")
    with contextlib.ExitStack() as stack:
        bodies: dict[str, Serve] = {"simulated": partial(simulated, engine)}
        if args.on_servers:
            device = replace(Device.named(args.preset, args.speed), engine=engine)
            servers = session_servers(args.output, device, all_answers())
            bodies["device clock"] = partial(served, stack.enter_context(KeptServer(servers)))
        asked = [newcomers(args.rate, args.num_requests, seed) for seed in range(args.seeds)]
        first: dict[str, list[list[float]]] = {}
        for policy, (name, serve) in product(args.policies, bodies.items()):
            rows = [_row(requests, serve(policy, requests)[0]) for requests in asked]
            reference = first.setdefault(name, rows)
            cells = [
                _cell(column, other)
                for column, other in zip(
                    zip(*rows, strict=True), zip(*reference, strict=True), strict=True
                )
            ]
            print(f"| `{policy}` {name} | {' | '.join(cells)} |", flush=True)


def _cell(values: Sequence[float], reference: Sequence[float]) -> str:
    ratios = [value / other for value, other in zip(values, reference, strict=True)]
    return f"{np.median(values):.3g} · {with_interval(ratios)}"


def main() -> int:
    """0; 2, with a line on stderr, if a server fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--policies", nargs="+", default=("fcfs", "sage"), metavar="NAME",
        help="ratios are to the first, paired by seed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--rate", type=float, default=4.0, help="default: %(default)s")
    parser.add_argument("--num-requests", type=int, default=240, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--chunk", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--preset", choices=PRESETS, default="h800-qwen3-32b")
    parser.add_argument(
        "--on-servers", action="store_true", help="on the preset's device clock too"
    )
    parser.add_argument("--speed", type=float, default=1.0, help="of the clock")
    parser.add_argument("--output", type=Path, default=Path("results/newcomers"), metavar="DIR")
    try:
        _compare(parser.parse_args())
    except ServerError as error:
        print(f"newcomers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
