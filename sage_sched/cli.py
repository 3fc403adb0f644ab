"""The command `sage-sched`. Each subcommand's module is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sage_sched.parts_finder import ALL, find_parts

# Subcommand: its module, which has run(argv) -> exit status, as its flags are SGLang's own; what it
# does.
OF_SERVERS = {
    "serve": (
        "patches.ops.serve_command",
        "start SGLang with --schedule-policy sage; takes every flag of `sglang serve`",
    ),
    "run": (
        "patches.ops.run_command",
        "run another launcher of SGLang (`dynamo.sglang`, say) that is to know our policies",
    ),
    "doctor": ("patches.ops.doctor", "say what keeps a server from starting here, and what to do"),
}
# Subcommand: its module, which has configure(parser) and run(args) -> exit status; what it does.
COMMANDS = {
    "demo": ("bench.experiment.demo", "see what it is worth: SGLang's policies tuned, and ours"),
    "set": ("patches.ops.set_command", "change the settings of a running server"),
    "explain": ("bench.explain.command", "say what happened to requests and why, by a trace"),
    "whatif": ("bench.whatif.command", "simulate your own traffic under other policies"),
    "warm": ("predictor_store.data.warm", "fill the predictor's store from datasets"),
    "predictor serve": (
        "predictor_store.service.serve_command",
        "serve one predictor to many servers",
    ),
    "train-probe": (
        "predictor_store.probe.command",
        "train a probe on hidden states that a server wrote down",
    ),
    "urgency train": ("predictor_store.urgency.command", "train a guess at how urgent prompts are"),
    "store info": ("predictor_store.data.store_info", "show what the predictor's store holds"),
    "bench": ("bench.experiment.compare", "compare policies on real servers"),
    "bench run": ("bench.experiment.run_command", "run an experiment, simulated or on servers"),
    "bench list": ("bench.experiment.list_command", "list the experiments"),
    "bench table": ("bench.experiment.table_command", "show the results of experiments"),
    "bench fit": ("bench.engines.server.fit", "measure a server's step times"),
    "bench validate": ("bench.engines.validate", "hold the simulator against real runs"),
    "bench predictor": ("bench.predictor.command", "hold predictors against answered prompts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line argv (without the program's name); its exit status."""
    find_parts(ALL)
    terminal = importlib.import_module("predictor_store.terminal")
    try:
        args = command_line().parse_args(argv)
        status = int(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.stop_printing()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:  # a file that is not there, a folder that cannot be written to
        print(f"sage-sched: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "sage_sched", *ALL):
            raise
        print(
            f"sage-sched: the package {missing!r} is not installed; docs/install.md says what a "
            "host needs",
            file=sys.stderr,
        )
        return 1
    return status


def command_line() -> argparse.ArgumentParser:
    """All commands. The options of one are there once it is called."""
    top = _Command(prog="sage-sched", **_group(""))
    top.add_argument("--version", action="version", version=_versions())
    parsers = {"": top}
    for name, (module, what) in (OF_SERVERS | COMMANDS).items():
        group, _, word = name.rpartition(" ")
        if group not in parsers:
            parsers[group] = parsers[""].add_command(group, **_group(group))
        about = _group(name) if any(_within(name, other) for other in COMMANDS) else {}
        parsers[name] = parsers[group].add_command(
            word, module=module, takes_all=name in OF_SERVERS, **{"description": what, **about}
        )
    return top


class _Command(argparse.ArgumentParser):
    """A command, a group of commands, or both, as `bench` is.

    module: of the command, "" of a group. takes_all: it reads its arguments itself.
    """

    def __init__(self, *, module: str = "", takes_all: bool = False, **about: Any) -> None:
        super().__init__(add_help=not takes_all, **about)
        self._module, self._takes_all = module, takes_all
        self._commands: argparse._SubParsersAction[_Command] | None = None
        self.set_defaults(run=self._run_nothing)

    def add_command(self, word: str, **about: Any) -> _Command:
        """One of this group."""
        if self._commands is None:
            self._commands = self.add_subparsers(
                metavar="COMMAND", parser_class=_Command, help="one of those below"
            )
        return self._commands.add_parser(word, **about)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        args = sys.argv[1:] if args is None else args
        is_within = self._commands is not None and args and args[0] in self._commands.choices
        if not self._module or is_within:
            return super().parse_known_args(args, namespace)
        if not self._takes_all:
            importlib.import_module("predictor_store.terminal").keep_quiet()
        command = importlib.import_module(self._module)
        if self._takes_all:
            return argparse.Namespace(run=lambda _: command.run([*args])), []
        command.configure(self)
        self.set_defaults(run=command.run)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown: {' '.join(unknown)}; see {self.prog} --help")
        return found, []

    def _run_nothing(self, _: argparse.Namespace) -> int:
        self.print_help(sys.stderr)
        return 2


def _group(name: str) -> dict[str, Any]:
    """What argparse is to say of a group: which commands it has."""
    rows = [
        f"  {other:17} {what}"
        for other, (_, what) in (OF_SERVERS | COMMANDS).items()
        if _within(name, other)
    ]
    return {
        "epilog": "\n".join(["commands (COMMAND --help says more):", *rows]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def _within(name: str, other: str) -> bool:
    return not name or other.startswith(f"{name} ")


def _versions() -> str:
    return f"sage-sched {_version('sage-sched')}, SGLang {_version('sglang')}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
