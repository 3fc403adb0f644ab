"""Finds the command that a command line names, and runs it. It imports only the module of the
called subcommand."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sage_sched.errors import UserError

# Subcommands that take SGLang's own flags: the module, which has run(argv) -> exit status, and the
# help text.
OF_SERVERS = {
    "serve": (
        "patches.ops.serve_command",
        "start SGLang with --schedule-policy sage; takes every flag of `sglang serve`",
    ),
    "run": (
        "patches.ops.run_command",
        "run another launcher of SGLang, such as `dynamo.sglang`, with our policies",
    ),
    "doctor": (
        "patches.ops.doctor",
        "say whether a server would start here, and what to do if not",
    ),
}
# Other subcommands: the module, which has configure(parser) and run(args) -> exit status, and the
# help text.
COMMANDS = {
    "demo": ("bench.experiment.demo", "compare SGLang's tuned policies with ours"),
    "settings": (
        "predictor_store.settings_command",
        "list what a settings file may hold, or print its JSON schema",
    ),
    "set": ("patches.ops.set_command", "change the settings of a running server"),
    "explain": (
        "patches.ops.explain_command",
        "say from a trace what happened to requests, and why",
    ),
    "top": ("patches.ops.top.command", "watch a running server"),
    "whatif": ("bench.whatif.command", "simulate your own traffic under other policies"),
    "warm": ("predictor_store.data.warm", "fill the predictor's store with answered prompts"),
    "formats": ("predictor_store.logs.formats_command", "list the formats of logs"),
    "predictor serve": (
        "predictor_store.service.serve_command",
        "serve one predictor to many servers",
    ),
    "train-probe": (
        "predictor_store.probe.command",
        "train a probe on the hidden states of a server",
    ),
    "store info": ("predictor_store.data.store_info", "show what the predictor's store holds"),
    "bench run": ("bench.experiment.run_command", "run an experiment, simulated or on servers"),
    "bench list": ("bench.experiment.list_command", "list the experiments"),
    "bench data": ("bench.experiment.data_command", "say what data experiments need"),
    "bench table": ("bench.experiment.table_command", "show the results of experiments"),
    "bench fit": ("bench.engines.server.fit", "measure a server's step times"),
    "bench predictor": ("bench.predictor.command", "score predictors on answered prompts"),
}


def run(argv: Sequence[str] | None, begins: Callable[[], object]) -> int:
    """Run the command line argv (without the program's name), and return the exit status. begins:
    is called when all is imported, before the command does anything."""
    terminal = importlib.import_module("predictor_store.terminal")
    terminal.take_any_output()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words, begins)
        sys.stdout.flush()
    except BrokenPipeError:
        terminal.stop_printing()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (UserError, OSError) as error:
        # An OSError is a missing file or a folder without write permission, for example.
        said = " ".join(str(error).split())
        print(terminal.printable(f"{_prog(_name(words))}: {said}"), file=sys.stderr)
        terminal.stop_printing_if_full()
        return 2
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "sage_sched", "patches", "predictor_store", "bench"):
            raise
        is_absent = isinstance(error, ModuleNotFoundError)
        why = "is not installed" if is_absent else f"cannot be imported ({error})"
        print(
            f"sage-sched: the package {missing!r} {why}; docs/index.md says what a host needs",
            file=sys.stderr,
        )
        return 1
    return status


def _run(argv: list[str], begins: Callable[[], object]) -> int:
    name = _name(argv)
    if not name:
        begins()
        return _help(argv)
    words = argv[len(name.split()) :]
    if name in OF_SERVERS:
        server = importlib.import_module(OF_SERVERS[name][0])
        begins()
        return int(server.run(words))
    importlib.import_module("predictor_store.terminal").keep_quiet()
    module, what = COMMANDS[name]
    command = importlib.import_module(module)
    parser = _parser(name, description=what)
    command.configure(parser)
    begins()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; see {parser.prog} --help")
    return int(command.run(args))


def _name(argv: Sequence[str]) -> str:
    """Return the command's name, or "" if argv names none."""
    names = (" ".join(argv[:2]), *argv[:1])
    return next((name for name in names if name in OF_SERVERS or name in COMMANDS), "")


def _help(argv: list[str]) -> int:
    """Print the help of a command group, such as `store`, or of an unknown command."""
    group = argv[0] if argv and _within(argv[0]) else ""
    parser = _parser(group)
    if not group:
        versions = f"sage-sched {_version('sage-sched')}, SGLang {_version('sglang')}"
        parser.add_argument("--version", action="version", version=versions)
    known = dict.fromkeys(other.removeprefix(group).split()[0] for other in _within(group))
    parser.add_argument(
        "command", metavar="COMMAND", nargs="?", choices=known, help="one of those below"
    )
    parser.parse_args(argv[1:] if group else argv)
    parser.print_help(sys.stderr)
    return 2


def _parser(name: str, **about: Any) -> argparse.ArgumentParser:
    """Return the parser of a command, or of a command group, whose help lists its commands. ""
    names the group of all commands."""
    within = _within(name)
    if within:
        rows = [f"  {other:17} {what}" for other, what in within.items()]
        about["epilog"] = "\n".join(["commands (COMMAND --help says more):", *rows])
        about["formatter_class"] = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=_prog(name), **about)


def _prog(name: str) -> str:
    return f"sage-sched {name}".rstrip()


def _within(group: str) -> dict[str, str]:
    """Return the help text of each command in a group, by name. "" names the group of all
    commands."""
    commands = OF_SERVERS | COMMANDS
    prefix = f"{group} " if group else ""
    return {name: what for name, (_, what) in commands.items() if name.startswith(prefix)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
