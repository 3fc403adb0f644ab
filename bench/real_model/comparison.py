"""Policies on a server with the real model: `python -m bench.real_model.comparison`.

The same chats go to a server of each policy, all within a short time; greedy, so that each policy
gets the same answers, which end by themselves or at the cap. The history of sage holds answers to
other prompts (bench.real_model.answers). Appends a record to bench/records/real_model.jsonl with
--record.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.real_model.answers import NUM_PROMPTS, read_answers
from bench.real_model.records import append
from bench.real_model.server import chat, serve
from bench.workloads.chats import prompts
from predictor_store.data.warm import Observation, warm_store
from predictor_store.predict.embedder import DEFAULT_ENCODER
from sage_sched.config import StoreConfig

POLICIES = ("fcfs", "shortest-prefill-first", "sage")
_SLOTS = ("--max-running-requests", "8")


def run(policy: str, asked: Sequence[str], spread_s: float, cap: int) -> dict[str, Any]:
    """Send the prompts evenly over spread_s seconds; how long the answers took."""

    def one(i: int) -> tuple[float, int, str]:
        time.sleep(max(0.0, began + spread_s * i / len(asked) - time.monotonic()))
        sent = time.monotonic()
        answer = chat(server.url, asked[i], temperature=0, max_tokens=cap)
        num_tokens: int = answer["usage"]["completion_tokens"]
        return time.monotonic() - sent, num_tokens, answer["choices"][0]["finish_reason"]

    with tempfile.TemporaryDirectory() as folder:
        if policy == "sage":
            _warm(Path(folder, "store"), asked)
        with serve(policy, Path(folder), _SLOTS) as server, ThreadPoolExecutor(len(asked)) as pool:
            began = time.monotonic()
            answers = list(pool.map(one, range(len(asked))))
            took_s = time.monotonic() - began
    ttlts_s, lengths, reasons = zip(*answers, strict=True)
    return {
        "experiment": "comparison",
        "policy": policy,
        "num_requests": len(asked),
        "mean_ttlt_s": float(np.mean(ttlts_s)),
        "median_ttlt_s": float(np.median(ttlts_s)),
        "p99_ttlt_s": float(np.quantile(ttlts_s, 0.99)),
        "took_s": took_s,
        "output_tokens": int(np.sum(lengths)),
        "num_cut": reasons.count("length"),
        "load": os.getloadavg()[0],
    }


def _warm(store: Path, asked: Sequence[str]) -> None:
    others = [each for each in read_answers() if each.prompt not in asked]
    observations = [
        Observation(each.prompt, each.output_tokens, each.input_tokens, each.is_cut)
        for each in others
    ]
    warm_store(store, observations, StoreConfig(), DEFAULT_ENCODER)


def main() -> int:
    parser = argparse.ArgumentParser(description="Policies on a real model's answers.")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--spread", type=float, default=30.0, help="seconds (%(default)s)")
    parser.add_argument("--cap", type=int, default=400, help="tokens (%(default)s)")
    parser.add_argument("--record", action="store_true", help="append to bench/records")
    args = parser.parse_args()
    asked = [text for text, _ in prompts(NUM_PROMPTS)]
    random.Random(0).shuffle(asked)
    rows = []
    for policy in args.policies:
        rows.append(run(policy, asked[: args.requests], args.spread, args.cap))
        print({name: round(x, 1) if isinstance(x, float) else x for name, x in rows[-1].items()})
        sys.stdout.flush()
        if args.record:
            append(rows[-1:], " ".join(["python -m bench.real_model.comparison", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
