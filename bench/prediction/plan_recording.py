"""Record hidden states of the plan language's model, on a real server.

python -m bench.engines.server.plan_model --output results/plan
python -m bench.prediction.plan_recording --model results/plan --answers 2000
sage-sched train-probe results/plan/recorded --out results/probe.safetensors
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import requests
from tqdm import tqdm

from bench.engines.server.plan_model import ANSWERS, plan_words
from bench.engines.server.policy_server import CPU_ENGINE_FLAGS, CPU_ENV
from bench.engines.server.server import STOCK_COMMAND, Server
from bench.workloads.forced_tokens import TOKENS_KEY, ForcedTokens
from bench.workloads.plan_language import KINDS, answer, ask
from bench.workloads.prompts import Workload, WorkloadRequest
from predictor_store.data.warm import Observation, warm_store
from predictor_store.torchvision_schemas import define_missing
from sage_sched.config import StoreConfig

_HISTORY = 1500
_AT_A_TIME = 64
CAP_TOKENS = 1536


def plan_history(number: int = _HISTORY, seed: int = 100) -> list[WorkloadRequest]:
    """Other prompts of the language, and how long answers to them were."""
    words, rng = plan_words(), np.random.default_rng(seed)
    prompts = [ask(words, rng) for _ in range(number)]
    return [
        WorkloadRequest(prompt.text, len(answer(prompt, words, rng)), KINDS[prompt.kind])
        for prompt in prompts
    ]


def plan_workload(model: Path, skip: int) -> Workload:
    """As servers are asked: that history, and the model's answers but the first ones, which its
    probes were trained on, to be said token by token."""
    evaluation = tuple(
        WorkloadRequest(row["prompt"], len(row["tokens"]), KINDS[row["kind"]], tuple(row["tokens"]))
        for row in plan_answers(model)[skip:]
    )
    return Workload(tuple(plan_history()), evaluation, "the plan language")


def plan_answers(model: Path) -> list[dict[str, Any]]:
    """The model's prompts and answers."""
    return [json.loads(line) for line in (model / ANSWERS).read_text().splitlines()]


def say(server: Server, rows: Sequence[dict[str, Any]], at_a_time: int = _AT_A_TIME) -> list[Any]:
    """Have the server give these answers; what it gave."""

    def one(row: dict[str, Any]) -> Any:
        body = {
            "text": row["prompt"],
            "custom_logit_processor": ForcedTokens.to_str(),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": CAP_TOKENS,
                "custom_params": {TOKENS_KEY: row["tokens"]},
            },
        }
        response = requests.post(f"{server.url}/generate", json=body, timeout=3600)
        response.raise_for_status()
        return response.json()

    with ThreadPoolExecutor(at_a_time) as threads:
        return [*tqdm(threads.map(one, rows), total=len(rows), desc="answers")]


def plan_server(
    model: Path, folder: Path, settings: str, flags: Iterable[str] = (), policy: str = "sage"
) -> Server:
    """One of ours for the model, with a history of the language. settings: further sections."""
    store = folder / "store"
    if not store.exists():
        past = [Observation(r.prompt, r.output_tokens) for r in plan_history()]
        warm_store(store, past, StoreConfig())
    config = folder / f"{policy}.toml"
    config.write_text(f'[store]\npath = "{store}"\non_disk = false\n{settings}')
    ours = ("--schedule-policy", policy, "--sage-config", str(config))
    return Server(
        model,
        (*CPU_ENGINE_FLAGS, "--enable-custom-logit-processor", *ours, *flags),
        log=folder / f"{policy}.log",
        env=CPU_ENV,
        command=STOCK_COMMAND,
    )


def main() -> None:
    """Start a server, have it say its answers, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--answers", type=int, default=2000)
    args = parser.parse_args()
    define_missing()
    model = args.model.absolute()
    folder = model / "server"
    folder.mkdir(exist_ok=True)
    settings = f'[probe]\nrecord = "{model / "recorded"}"\n'
    flags = ("--max-total-tokens", "60000", "--max-running-requests", str(_AT_A_TIME))
    with plan_server(model, folder, settings, flags) as server:
        said = say(server, plan_answers(model)[: args.answers])
        wrong = sum(
            given["meta_info"]["completion_tokens"] != len(row["tokens"])
            for given, row in zip(said, plan_answers(model), strict=False)
        )
        time.sleep(2)  # for what is yet to be written
        state = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]
        print(f"{len(said)} answers, {wrong} of another length; {state['sage']['probe']}")


if __name__ == "__main__":
    main()
