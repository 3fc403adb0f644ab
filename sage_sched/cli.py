"""The command `sage-sched`. Each subcommand's module is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys

# Subcommand: its module, which has configure(parser) and run(args) -> exit status; what it does.
_COMMANDS = {
    "warm": ("predictor_store.warm_command", "fill the predictor's store from datasets"),
    "store": ("predictor_store.info_command", "show what the predictor's store holds"),
    "bench": ("bench.command", "compare policies on real servers"),
}
_SERVE_HELP = "start SGLang with --schedule-policy sage; takes every flag of `sglang serve`"


def main(argv: list[str] | None = None) -> int:
    """Run the command line argv (without the program's name); its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["serve"]:  # its flags are SGLang's own, so no parser of ours reads them
        serve = importlib.import_module("patches.serve_command")
        return int(serve.run(argv[1:]))
    parser = argparse.ArgumentParser(prog="sage-sched", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    subparsers.add_parser("serve", help=_SERVE_HELP)
    chosen = argv[0] if argv and argv[0] in _COMMANDS else None
    for name, (module, help_text) in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_text)
        if name == chosen:
            command = importlib.import_module(module)
            command.configure(subparser)
    args = parser.parse_args(argv)
    return int(command.run(args))
