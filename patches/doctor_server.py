"""What `sage-sched doctor` looks at of SGLang: packages, release, plugin, hooks, GPU, flags.

SGLang is imported where it is looked at alone: that it cannot be is one of the findings.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from patches.compat import SUPPORTED_RELEASES, UnsupportedServerError
from patches.finding import Finding, fault, fine
from patches.serve_command import value_of, with_policy
from sage_sched.config import SageConfig
from sage_sched.shadow import OURS, displaced, what_is_in_the_way

_INSTALL = f'install it: pip install "sglang=={SUPPORTED_RELEASES[-1]}"'


def packages() -> Iterator[Finding]:
    """Ours, and a user's own of the same names: on the path, or here, where `python -m` looks."""
    found = displaced()
    for name, origin in found.items():
        yield fault(
            "packages", what_is_in_the_way(name, origin),
            f"take its folder off PYTHONPATH, or give the package {name!r} another name",
        )  # fmt: skip
    ours = Path(__file__).parents[1]
    for name in OURS:
        here = [Path.cwd() / f"{name}.py", Path.cwd() / name / "__init__.py"]
        if name not in found and Path.cwd() != ours and any(file.exists() for file in here):
            found[name] = ""
            yield fault(
                "packages", f"{Path.cwd()} has a {name!r} of its own, which `python -m` takes",
                "start the server from another directory, by `sage-sched serve`, or by "
                "`python -P -m sglang.launch_server`",
            )  # fmt: skip
    if not found:
        yield fine("packages", f"ours, in {ours}")


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
    group = "sglang.srt.plugins"
    names = {point.name: point.value for point in entry_points(group=group)}
    if names.get("sage_sched") != "patches.plugin:register":
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
    yield fine("plugin", f"registered, with {_torch_version()}")


def _torch_version() -> str:
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:
        return "no torch"


def hooks(config: SageConfig) -> Iterator[Finding]:
    """Every place of SGLang that is hooked."""
    from patches.http_processes import main_process_hooks
    from patches.predict import predict_hooks
    from patches.scheduler_hooks import scheduler_hooks

    app = os.environ.get("SGLANG_HTTP_SERVER_APP_PATH")
    placed = [*scheduler_hooks(config), *predict_hooks(), *main_process_hooks()]
    if app is None:  # the last of them has set it
        del os.environ["SGLANG_HTTP_SERVER_APP_PATH"]
    misfits = 0
    for hook in placed:
        try:
            hook.check()
        except UnsupportedServerError as error:
            misfits += 1
            yield fault("hooks", error, "see release; another plugin may have changed it too")
    if not misfits:
        yield fine("hooks", f"{len(placed)}, and all fit")


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
