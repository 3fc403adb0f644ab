"""sage-sched doctor: will a server start here, and if not, why not?

Looks at the packages, SGLang's release, the hooks, the settings, the store, the predictor, the
model, the GPU, host memory, the port and the flags, and says of each fault what to do. Starts no
server, and changes nothing. Exit status: 0 if there is no fault, 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version

from patches.ops import doctor_predictor, doctor_server
from patches.ops.finding import Finding, fault
from patches.ops.serve_command import value_of
from predictor_store.config_file import read_config
from predictor_store.terminal import add_json, keep_quiet, print_json, speaker
from sage_sched.config import SageConfig
from sage_sched.fields import ConfigError


def run(argv: Sequence[str]) -> int:
    """Print the findings; the exit status."""
    keep_quiet()
    parser = argparse.ArgumentParser(
        prog="sage-sched doctor",
        usage="sage-sched doctor [-h] [--json] [any flag of the server]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a server's flags are for the server
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
    """argv: the flags of a server; none: they are not looked at. As with `sage-sched serve`, its
    policy is sage unless one is named."""
    config, said = _settings(argv)
    yield said
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("packages", doctor_server.packages),
        ("release", doctor_server.release),
        ("plugin", doctor_server.plugin),
        ("hooks", doctor_server.hooks),
        ("store", lambda: doctor_predictor.store(config)),
        ("predictor", lambda: doctor_predictor.predictor(config)),
        ("model", lambda: doctor_predictor.model(value_of(argv, "--model-path", "--model"))),
        ("GPU", lambda: doctor_server.gpu(argv)),
        ("host memory", lambda: doctor_server.host_memory(config.preemption.host_pool_gib)),
        ("port", lambda: doctor_server.port(argv)),
        ("flags", lambda: doctor_server.flags(argv, with_settings=said.level != "FAULT")),
    ]
    for about, check in checks:
        try:
            yield from check()
        except Exception as error:  # what a broken installation raises can be anything
            yield fault(about, f"cannot be looked at: {error!r}", "report this, with the message")


def _settings(argv: Sequence[str]) -> tuple[SageConfig, Finding]:
    """As a server reads them; the defaults if it cannot."""
    file = value_of(argv, "--sage-config") or os.environ.get("SAGE_CONFIG")
    try:
        config = read_config(file)
    except ConfigError as error:
        do = "correct the field that is named (docs/settings.md)"
        return SageConfig(), fault("settings", error, do)
    said = f"sage-sched {version('sage-sched')}, {file or 'by default'}"
    return config, Finding("ok", "settings", said)
