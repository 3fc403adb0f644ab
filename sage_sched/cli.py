"""The command `sage-sched`. Each subcommand's module is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys

from sage_sched.entry_points import ALL, find_parts

# Subcommand: its module, which has run(argv) -> exit status, as its flags are SGLang's own; what it
# does.
_OF_SERVERS = {
    "serve": (
        "patches.serve_command",
        "start SGLang with --schedule-policy sage; takes every flag of `sglang serve`",
    ),
    "doctor": ("patches.doctor", "say what keeps a server from starting here, and what to do"),
}
# Subcommand: its module, which has configure(parser) and run(args) -> exit status; what it does.
_COMMANDS = {
    "set": ("patches.set_command", "change by what a running server goes"),
    "explain": ("patches.explain_command", "say what happened to requests and why, by a trace"),
    "whatif": ("bench.whatif.command", "simulate your own traffic under other policies"),
    "warm": ("predictor_store.warm_command", "fill the predictor's store from datasets"),
    "predictor serve": ("predictor_store.serve_command", "serve one predictor to many servers"),
    "train-probe": (
        "predictor_store.train_probe_command",
        "train a probe on hidden states that a server wrote down",
    ),
    "urgency train": ("predictor_store.urgency_command", "train a guess at how urgent prompts are"),
    "store info": ("predictor_store.info_command", "show what the predictor's store holds"),
    "bench fit": ("bench.calibration.fit", "measure a server's step times"),
    "bench validate": ("bench.calibration.validate", "hold the simulator against real runs"),
    "bench predictor": ("bench.prediction.command", "hold predictors against answered prompts"),
    "bench paper": ("bench.paper.command", "re-run SageSched's evaluation in the simulator"),
    "bench urgency": ("bench.triage.command", "urgent requests among others, simulated"),
    "bench slo": ("bench.slo.command", "compare policies by deadlines met, in the simulator"),
    "bench cluster": ("bench.cluster.command", "compare dispatchers on many engines, simulated"),
    "bench agents": ("bench.comparison.agents", "compare policies on sessions of coding agents"),
    "bench": ("bench.comparison.command", "compare policies on real servers"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line argv (without the program's name); its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    find_parts(ALL)
    for name, (module, _) in (_OF_SERVERS | _COMMANDS).items():
        words = name.split()
        if argv[: len(words)] == words:
            return _run(name, module, argv[len(words) :])
    asked_for_help = argv in (["-h"], ["--help"])
    print(_usage(), file=sys.stdout if asked_for_help else sys.stderr)
    return 0 if asked_for_help else 2


def _run(name: str, module: str, argv: list[str]) -> int:
    command = importlib.import_module(module)
    if name in _OF_SERVERS:
        return int(command.run(argv))
    parser = argparse.ArgumentParser(prog=f"sage-sched {name}")
    command.configure(parser)
    return int(command.run(parser.parse_args(argv)))


def _usage() -> str:
    rows = [(name, what) for name, (_, what) in (_OF_SERVERS | _COMMANDS).items()]
    lines = [f"  {name:17}{what}" for name, what in rows]
    return "\n".join(["usage: sage-sched COMMAND ... (COMMAND --help says more)", "", *lines])
