"""Runs the comparison on a host with a GPU: `python -m tests.checks.gpu_comparison`.

The model has Llama 3.1 8B's shape with SGLang's dummy weights, and answers have recorded lengths.
So times are those of the real model, and nothing is downloaded. It takes the options of `sage-sched
bench`, with defaults for one GPU. Every result lists the hardware and versions.

`--shape tiny --device cpu` tries the same path on a small model without a GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from bench.engines.server.facts import host_facts
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import CPU_ENV, CPU_FLAGS, CPU_MODEL
from bench.experiment import compare as command

# Llama 3.1 8B (its config.json); with --load-format dummy it needs no weights.
_LLAMA_31_8B = {
    "num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32,
    "num_kv_heads": 8, "vocab_size": 128256, "context_length": 8192, "dtype": "bfloat16",
    "weights": False,
}  # fmt: skip
_SMALL = _LLAMA_31_8B | {
    "num_layers": 4, "hidden_size": 1024, "intermediate_size": 2816, "num_heads": 8,
    "num_kv_heads": 4, "vocab_size": 32000,
}  # fmt: skip
GPU_SHAPES = {"llama31-8b": _LLAMA_31_8B, "small": _SMALL}
SHAPES = {**GPU_SHAPES, "tiny": {**CPU_MODEL, "weights": False}}
# A KV pool of about 200 requests of the workload. At twice the capacity it is full, as on a busy
# server, without the minutes that filling a large GPU's whole memory would take.
GPU_FLAGS = ("--max-total-tokens", "131072", "--max-running-requests", "256")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    command.configure(parser)
    parser.add_argument("--shape", choices=SHAPES, default="llama31-8b", help="of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.set_defaults(num_requests=500, output=Path("results/gpu"))
    args = parser.parse_args(argv)
    facts, on_cpu = host_facts(), args.device == "cpu"
    if not on_cpu and facts["gpu"] == "none":
        print("gpu_comparison: this host has no GPU that torch can use", file=sys.stderr)
        return 2
    if args.model_path is None:
        args.model_path = write_model(args.output / "model", **SHAPES[args.shape])
    if args.server_flags is None:
        args.server_flags = ["--load-format", "dummy", *(CPU_FLAGS if on_cpu else GPU_FLAGS)]
    print(json.dumps(facts, indent=2))
    print("server flags:", shlex.join(args.server_flags), flush=True)
    return command.run(args, server_env=CPU_ENV if on_cpu else {})


if __name__ == "__main__":
    sys.exit(main())
