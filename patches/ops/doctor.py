"""sage-sched doctor: checks whether a server would start here, and says what prevents it.

It checks the settings, SGLang's release, the hooks, the store, sockets, the predictor, the GPU,
host memory and the flags, and says how to fix each fault. It starts no server and changes nothing.
A running server tells whether its slots bind.
The exit status is 1 if there is a fault, otherwise 0.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

from patches.flags import named
from patches.ops import checks
from patches.ops.checks import FaultError, Note
from predictor_store.config_file import read_config
from predictor_store.terminal import add_json, keep_quiet, print_json, speaker
from sage_sched.app.config import SageConfig
from sage_sched.fields import ConfigError


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    level: a FAULT keeps a server from starting, or from being of use; a note does not.
    about: the checked part.
    said: the finding.
    do: the remedy; "" if none is needed.
    """

    level: Literal["ok", "note", "FAULT"]
    about: str
    said: str
    do: str = ""

    def __str__(self) -> str:
        line = f"{self.level:6}{self.about}: {self.said}"
        return f"{line}\n      what to do: {self.do}" if self.do else line


def run(argv: Sequence[str]) -> int:
    """Print the findings and return the exit status."""
    keep_quiet()
    parser = argparse.ArgumentParser(
        prog="sage-sched doctor",
        usage="sage-sched doctor [-h] [--json] [any flag of the server]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a server's flags must not match ours
    )
    add_json(parser)
    args, flags = parser.parse_known_args(argv)
    say, found = speaker(args), list[Finding]()
    for finding in findings(flags):
        say(finding, flush=True)
        found.append(finding)
    num_faults = sum(finding.level == "FAULT" for finding in found)
    plural = "" if num_faults == 1 else "s"
    say(f"\n{num_faults} fault{plural}" if num_faults else "\nno fault found")
    if args.json:
        print_json([asdict(finding) for finding in found])
    return 1 if num_faults else 0


def findings(argv: Sequence[str]) -> Iterator[Finding]:
    """Run all checks. As with `sage-sched serve`, the policy is sage unless the flags name one.

    argv: the flags of a server; without any, flags are not checked.
    """
    flags = _named(argv)
    config, said = _settings(flags)
    yield said
    looks: list[tuple[str, Callable[[], str]]] = [
        ("release", checks.release),
        ("plugin", checks.plugin),
        ("hooks", checks.hooks),
        ("store", lambda: checks.store(config)),
        ("sockets", checks.sockets),
        ("predictor", lambda: checks.predictor(config)),
        ("GPU", lambda: checks.gpu(flags)),
        ("host memory", lambda: checks.host_memory(config.preemption.host_pool_gib)),
        ("chunks", lambda: checks.chunks(config, flags)),
        ("slots", lambda: checks.slots(flags)),
        ("flags", lambda: checks.flags(argv, with_settings=said.level != "FAULT")),
    ]
    for about, look in looks:
        try:
            found = look()
        except FaultError as fault:
            yield from (Finding("FAULT", about, line, fault.do) for line in fault.said)
        except Exception as error:  # a broken installation may raise anything
            what = f"cannot be checked: {error!r}"
            yield Finding("FAULT", about, what, "report this, with the message")
        else:
            yield Finding("note" if isinstance(found, Note) else "ok", about, found)


def _named(argv: Sequence[str]) -> dict[str, Any]:
    """Return the named flags (see named); {} if SGLang cannot parse them, which a check will
    report."""
    try:
        return named(argv) if argv else {}
    except (Exception, SystemExit):  # a broken installation may raise anything
        return {}


def _settings(flags: Mapping[str, Any]) -> tuple[SageConfig, Finding]:
    """Return the settings as a server reads them; the defaults if it cannot."""
    file = flags.get("sage_config") or os.environ.get("SAGE_CONFIG")
    try:
        config = read_config(file)
    except ConfigError as error:
        do = "correct the field that is named (docs/settings.md)"
        return SageConfig(), Finding("FAULT", "settings", " ".join(str(error).split()), do)
    said = f"sage-sched {version('sage-sched')}, {file or 'by default'}"
    return config, Finding("ok", "settings", said)
