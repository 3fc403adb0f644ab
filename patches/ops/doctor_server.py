"""What `sage-sched doctor` looks at of SGLang: packages, release, plugin, hooks, GPU, flags.

SGLang is imported where it is looked at alone: that it cannot be is one of the findings.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from patches.compat import SUPPORTED_RELEASES
from patches.ops.finding import Finding, fault, fine
from patches.ops.fit import misfits, targets
from patches.ops.serve_command import value_of, with_policy
from predictor_store.torchvision_schemas import define_missing
from sage_sched.entry_points import parts_folder

_INSTALL = f'install it: pip install "sglang=={SUPPORTED_RELEASES[-1]}"'


def packages() -> Iterator[Finding]:
    """Ours, whatever else on the path has their names."""
    yield fine("packages", f"sage-sched {version('sage-sched')}, in {parts_folder()}")


def release() -> Iterator[Finding]:
    try:
        from sglang.version import __version__ as imported
    except ImportError:
        yield fault("release", "SGLang is not installed", _INSTALL)
        return
    if imported not in SUPPORTED_RELEASES:
        yield fault(
            "release",
            f"SGLang {imported} is installed, supported: {', '.join(SUPPORTED_RELEASES)}",
            f"{_INSTALL}; or choose one of SGLang's own policies",
        )
        return
    yield fine("release", f"SGLang {imported}")


def plugin() -> Iterator[Finding]:
    """Whether SGLang finds us."""
    if not entry_points(group="sglang.srt.plugins", name="sage_sched"):
        yield fault(
            "plugin", "sage-sched is not among SGLang's plugins",
            "install it in this environment (pip install .); a checkout on PYTHONPATH is not "
            "enough",
        )  # fmt: skip
        return
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "sage_sched" not in [name.strip() for name in allowed.split(",")]:
        yield fault(
            "plugin", f"SGLANG_PLUGINS is {allowed!r}: SGLang loads no other",
            "add sage_sched to it, or unset it",
        )  # fmt: skip
        return
    if (asked := os.environ.get("SGLANG_PLATFORM")) not in (None, "", "sage_cpu"):
        yield fault(
            "plugin", f"SGLANG_PLATFORM is {asked!r}, which leaves out the plugins of packages "
            "that have a platform of another name, as this one has",
            "unset it",
        )  # fmt: skip
        return
    yield fine("plugin", f"registered, with {_torch_version()}")


def _torch_version() -> str:
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:
        return "no torch"


def host_memory(asked_gib: float) -> Iterator[Finding]:
    """For the KV of requests that have left. asked_gib: the setting; 0: a share of what is free."""
    from patches.scheduler.host_memory import SHARE, free_bytes

    free_gib = free_bytes() / 2**30
    if asked_gib > free_gib:
        yield fault(
            "host memory", f"host_pool_gib is {asked_gib:g}, for each rank, and {free_gib:.1f} GiB "
            "are free", "lower it, or leave it out",
        )  # fmt: skip
        return
    taken = f"{asked_gib:g} GiB a rank" if asked_gib else f"{SHARE * free_gib:.1f} GiB"
    yield fine(
        "host memory", f"{free_gib:.1f} GiB free; KV of requests that yield may take {taken}"
    )


def hooks() -> Iterator[Finding]:
    """Every module of ours, every place of SGLang that is hooked, and every call."""
    define_missing()  # as the platform does: SGLang needs them to be imported
    found = misfits()
    for misfit in found:
        yield fault("hooks", misfit, "see release; another plugin may have changed it too")
    if not found:
        yield fine("hooks", f"{len(targets())}, and all fit")


def gpu(argv: Sequence[str]) -> Iterator[Finding]:
    """What torch sees of accelerators, against what the flags ask for."""
    import torch

    asked = value_of(argv, "--device") or ""
    wanted = int(value_of(argv, "--tp-size", "--tensor-parallel-size", "--tp") or 1)
    num_seen = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if asked == "cpu" or os.environ.get("SGLANG_PLATFORM") == "sage_cpu":
        yield Finding("note", "GPU", f"the CPU is asked for; {num_seen} accelerators are seen")
    elif not num_seen:
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        seen = Path("/dev/nvidia0").exists()
        yield fault(
            "GPU", f"torch sees none (torch {torch.__version__}, {built}; the driver "
            f"{'has' if seen else 'shows no'} device)",
            "install torch for your driver's CUDA" if seen and torch.version.cuda is None
            else "see that `nvidia-smi` works here; without a GPU, give --device cpu",
        )  # fmt: skip
    elif wanted > num_seen:
        yield fault(
            "GPU", f"--tp-size is {wanted}, and {num_seen} are seen",
            "ask for no more than there are, or see CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    else:
        yield fine("GPU", f"{num_seen}, the first: {torch.cuda.get_device_name(0)}")


def port(argv: Sequence[str]) -> Iterator[Finding]:
    """Whether it can listen there."""
    if not argv:
        return
    host, text = value_of(argv, "--host") or "127.0.0.1", value_of(argv, "--port") or "30000"
    if not text.isdecimal() or int(text) > 65_535:
        return  # SGLang says so, of its flags
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(text), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        do = "give another --port, or end what listens there"
        if error.errno != errno.EADDRINUSE:
            do = "correct --host or --port"
        yield fault("port", f"{host}:{text} cannot be had: {error.strerror or error}", do)
        return
    yield fine("port", f"{host}:{text} is free")


def flags(argv: Sequence[str], with_settings: bool) -> Iterator[Finding]:
    """By SGLang's own parser, with our plugin. with_settings: whether those can be read."""
    if not argv:
        yield Finding("note", "flags", "none given: `sage-sched doctor FLAGS` looks at a server's")
        return
    if not with_settings:
        yield Finding("note", "flags", "not looked at, as the settings cannot be read")
        return
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    printed = io.StringIO()
    do = "leave the flag out, or change its value"
    try:
        with contextlib.redirect_stderr(printed):
            server_args = prepare_server_args(with_policy(argv))
    except SystemExit as refusal:
        last = (printed.getvalue().strip().splitlines() or [""])[-1]
        yield fault("flags", last if isinstance(refusal.code, int) else refusal.code, do)
    except Exception as error:
        yield fault("flags", f"SGLang does not take them: {error}", do)
    else:
        yield fine("flags", f"taken; --schedule-policy {server_args.schedule_policy}")
