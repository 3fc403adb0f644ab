"""`sage-sched doctor`: whether a server would start here, without starting one."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from importlib.metadata import entry_points, version
from pathlib import Path

from patches.compat import SUPPORTED_RELEASES, check_release
from predictor_store.config_file import read_config
from predictor_store.info_command import describe
from predictor_store.store import default_path, file_of
from predictor_store.torchvision_schemas import define_missing
from sage_sched.config import SageConfig


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sage-config", metavar="FILE", help="settings that are to be used")


def run(args: argparse.Namespace) -> int:
    """A line for each thing that a server needs; exit status 1 if one of them is not as it must be,
    in which case its line says what to do."""
    define_missing()  # as the platform does; else SGLang cannot be imported where they are missing
    path = args.sage_config or os.environ.get("SAGE_CONFIG")
    checks: dict[str, Callable[[], str]] = {
        "versions": _versions,
        "release": _release,
        "plugin": _plugin,
        "hooks": _hooks,
        "device": _device,
        "settings": lambda: _settings(path),
        "encoder": lambda: _encoder(read_config(path)),
        "store": lambda: _store(read_config(path)),
    }
    healthy = True
    for name, check in checks.items():
        try:
            verdict, said = "ok", check()
        except Exception as error:  # each says what to do
            verdict, said, healthy = "FAILED", f"{error}", False
        print(f"{verdict:8}{name:10}{said}", flush=True)
    return 0 if healthy else 1


def _versions() -> str:
    names = ("sage-sched", "sglang", "torch")
    return ", ".join([f"Python {platform.python_version()}", *(f"{n} {version(n)}" for n in names)])


def _release() -> str:
    check_release()
    return f"supported are SGLang {', '.join(SUPPORTED_RELEASES)}"


def _plugin() -> str:
    """As SGLang's own look for plugins (srt/plugins/__init__.py)."""
    found = entry_points(group="sglang.srt.plugins", name="sage_sched")
    if not found:
        raise RuntimeError("SGLang finds no plugin sage_sched: install sage-sched with pip")
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]
    if any(allowed) and "sage_sched" not in allowed:
        raise RuntimeError(
            "SGLANG_PLUGINS leaves it out: unset it, or add sage_sched to it (and sage_cpu, where "
            "there is no accelerator)"
        )
    asked_for = os.environ.get("SGLANG_PLATFORM")
    if asked_for not in (None, "", "sage_cpu"):
        raise RuntimeError(
            f"SGLANG_PLATFORM={asked_for} leaves out the plugins of packages that have a platform "
            "of another name, as this one has: unset it"
        )
    return "SGLang finds it"


def _hooks() -> str:
    from patches.fit import misfits, targets

    if found := misfits():
        raise RuntimeError("\n".join(found))
    return f"all {len(targets())} fit"


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}"
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return f"no accelerator: {os.cpu_count()} CPU cores, on plain PyTorch"


def _settings(path: str | None) -> str:
    read_config(path)
    return path or "the defaults"


def _encoder(config: SageConfig) -> str:
    from predictor_store.embedder import Embedder

    if config.predictor.service:
        return f"that of the service at {config.predictor.service}"
    (vector,) = Embedder(config.predictor.encoder, 1).embed(["Does it work?"])
    return f"{config.predictor.encoder}, {len(vector)} numbers a prompt"


def _store(config: SageConfig) -> str:
    if config.predictor.service:
        return f"that of the service at {config.predictor.service}"
    folder = Path(config.store.path).expanduser() if config.store.path else default_path()
    if not file_of(folder).exists():
        return f"none yet in {folder}: the first server makes one (`sage-sched warm` fills it)"
    return f"{folder}, {describe(folder)['records']}"
