"""The checks of `sage-sched doctor`, one function each. A check returns its finding as a line, or
raises FaultError. SGLang is imported only inside a check, because the import itself may fail."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points, version
from typing import Any

import zmq

from patches.compat import SUPPORTED_RELEASES, UnsupportedServerError, check_release
from patches.ops.fit import misfits, targets
from patches.ops.serve_command import with_policy
from patches.scheduler.host_memory import SHARE, free_bytes
from predictor_store.ask_server import ask
from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.predict.regression import GeneralLength
from predictor_store.service.endpoint import PredictorError
from predictor_store.service.link import connect_worker
from predictor_store.service.own_process import socket_folder
from predictor_store.store import lock
from predictor_store.store.file import StoreError
from predictor_store.store.store import Store, folder_of, has_store
from predictor_store.torchvision_schemas import define_missing
from sage_sched.app.config import SageConfig, StepTimeConfig
from sage_sched.errors import UserError
from sage_sched.fields import MOST
from sage_sched.steps import attended_pairs, least_bound_s

_INSTALL = f'install it: pip install "sglang=={SUPPORTED_RELEASES[-1]}"'
_LEAST_FREE_BYTES = 200e6
_PATIENCE_S = 10.0
# SGLang's --chunked-prefill-size on large GPUs.
_CHUNK_TOKENS = 8192


class FaultError(Exception):
    """A fault that keeps a server from starting or from being of use, with its remedy."""

    def __init__(self, said: object, do: str) -> None:
        """said: the message, an exception, or a list of these."""
        self.said = [" ".join(str(one).split()) for one in (said if type(said) is list else [said])]
        self.do = do


class Note(str):
    """A finding that is neither good nor bad."""


@contextlib.contextmanager
def _fault_of(kinds: type[Exception] | tuple[type[Exception], ...], do: str) -> Iterator[None]:
    """Turn exceptions of these kinds into faults within this context."""
    try:
        yield
    except kinds as error:
        raise FaultError(error, do) from error


def release() -> str:
    """Check that SGLang is installed, in a supported release."""
    try:
        with _fault_of(UnsupportedServerError, _INSTALL):
            check_release()
    except ImportError:
        raise FaultError("SGLang is not installed", _INSTALL) from None
    return f"SGLang {version('sglang')}"


def plugin() -> str:
    """Check that SGLang finds our plugin."""
    if not entry_points(group="sglang.srt.plugins", name="sage_sched"):
        raise FaultError(
            "sage-sched is not among SGLang's plugins",
            "install it in this environment (pip install .); a checkout on PYTHONPATH is not "
            "enough",
        )
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "sage_sched" not in [name.strip() for name in allowed.split(",")]:
        raise FaultError(
            f"SGLANG_PLUGINS is {allowed!r}: SGLang loads no other",
            "add sage_sched to it, or unset it",
        )
    if (asked := os.environ.get("SGLANG_PLATFORM")) not in (None, "", "sage_cpu"):
        raise FaultError(
            f"SGLANG_PLATFORM is {asked!r}: SGLang loads no plugins of packages whose platform has "
            "another name, such as sage-sched",
            "unset it",
        )
    return "registered"


def hooks() -> str:
    """Check that all our modules, our hooks and our calls fit SGLang."""
    define_missing()  # as the platform does: importing SGLang needs them
    if found := misfits():
        raise FaultError(found, "see `release` above; another plugin may have changed SGLang too")
    return f"{len(targets())}, and all fit"


def store(config: SageConfig) -> str:
    """Check that this process can read the store now, and write to it."""
    if config.predictor.service:
        return Note("the predictor service has it")
    folder = folder_of(config.store)
    exists = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    can_write = exists.is_dir() and os.access(exists, os.W_OK | os.X_OK)
    if config.store.on_disk and not can_write:
        raise FaultError(
            f"{exists} is no folder that this user may write to",
            "name another in store.path, or set store.on_disk = false",
        )
    encoder, num_records = config.predictor.encoder, 0
    with _fault_of(StoreError, "do what the message says, or name another folder in store.path"):
        if has_store(folder):
            as_it_is = replace(config.store, on_disk=False)
            with Store(as_it_is, fingerprint(encoder), dimension(encoder)) as opened:
                num_records = len([*opened.load()])
    said = f"{num_records} records in {folder}"
    if not config.store.on_disk:
        return f"{said}, which stays as it is"
    place = folder / "lock"
    with _fault_of(OSError, f"remove {place}"), contextlib.suppress(FileNotFoundError):
        os.close(os.open(place, os.O_RDWR | os.O_NOFOLLOW))  # as the server does
    if (pid := lock.holder(folder)) is not None:
        raise FaultError(
            f"{folder} is in use by process {pid}",
            "end that server, or give this one another store.path; several servers can share one "
            "predictor through predictor.service",
        )
    if (free := shutil.disk_usage(exists).free) < _LEAST_FREE_BYTES:
        raise FaultError(f"{free / 1e6:.0f} MB are free on its disk, too few", "make room there")
    return said


def sockets() -> str:
    """Check that Unix sockets fit in the folder for temporary files, and that ours can be made."""
    folder, most = tempfile.gettempdir(), zmq.IPC_PATH_MAX_LEN
    do = "set TMPDIR to a short folder that this user may write to, such as /tmp"
    # ServerArgs names its sockets as NamedTemporaryFile does.
    if len(os.fsencode(f"{folder}/tmp{'x' * 8}")) > most:
        raise FaultError(f"{folder} is too long for SGLang's sockets, of {most} bytes at most", do)
    if not os.access(ours := socket_folder(), os.W_OK | os.X_OK):
        raise FaultError(f"{ours} is no folder that this user may write to", do)
    return f"in {ours}"


def predictor(config: SageConfig) -> str:
    """Check that the predictor answers."""
    if config.predictor.service:
        do = "start the service, or correct predictor.service and its token"
        with _fault_of((PredictorError, StoreError, ValueError), do):
            connect_worker(config, "", _PATIENCE_S).close()
        return f"the service at {config.predictor.service} answers"
    encoder = config.predictor.encoder
    try:
        Embedder(encoder, num_threads=1).embed(["Is anybody there?"])
        GeneralLength.shipped(encoder)
    except Exception as error:  # a missing package, a missing or damaged file of the encoder
        do = "reinstall sage-sched; if its folder in the user's cache is damaged, remove that"
        raise FaultError(f"the encoder {encoder!r} cannot be loaded: {error!r}", do) from error
    return f"encoder {encoder!r} works"


def gpu(flags: Mapping[str, Any]) -> str:
    """Check that torch sees the accelerators that the flags ask for."""
    import torch

    wanted = _whole(flags, "tp_size", 1)
    num_seen = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if flags.get("device") == "cpu" or os.environ.get("SGLANG_PLATFORM") == "sage_cpu":
        return Note(f"the flags ask for the CPU; torch sees {num_seen} accelerators")
    if not num_seen:
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise FaultError(
            f"torch sees none (torch {torch.__version__}, built {built})",
            "check that `nvidia-smi` works here, and install torch for your driver's CUDA; without "
            "a GPU, give --device cpu",
        )
    if wanted is not None and wanted > num_seen:
        raise FaultError(
            f"--tp-size is {wanted}, but torch sees {num_seen}",
            "lower it, or check CUDA_VISIBLE_DEVICES",
        )
    return f"{num_seen}, the first: {torch.cuda.get_device_name(0)}"


def host_memory(asked_gib: float) -> str:
    """Check that host memory suffices for the KV of preempted requests. asked_gib: the setting."""
    free_gib = free_bytes() / 2**30
    if asked_gib > free_gib:
        raise FaultError(
            f"host_pool_gib is {asked_gib:g} for each rank, but {free_gib:.1f} GiB are free",
            "lower it, or leave it out",
        )
    taken = f"{asked_gib:g} GiB a rank" if asked_gib else f"{SHARE * free_gib:.1f} GiB"
    return f"{free_gib:.1f} GiB free; KV of preempted requests may take {taken}"


def chunks(config: SageConfig, flags: Mapping[str, Any]) -> str:
    """Report how long a chunk of a prompt delays running requests, by the times in [step_time]."""
    num_tokens = _whole(flags, "chunked_prefill_size", _CHUNK_TOKENS)
    if num_tokens is None:
        return Note("see flags")  # SGLang's parser reports the fault
    if num_tokens < 1:
        return Note("prompts are not chunked")
    step_time = (config.step_time or StepTimeConfig()).step_time()
    chunk_s = step_time.prefill_s(1, num_tokens, attended_pairs(0, num_tokens))
    decode_s = step_time.decode_base_s
    decode = config.decode
    bound_s = max(decode.max_gap_ms / 1e3, least_bound_s(decode_s, step_time, decode.cuts))
    beside = step_time.tokens_within(min(bound_s - decode_s, chunk_s), 0)
    return Note(
        f"a chunk of {num_tokens} tokens takes {1e3 * chunk_s:.0f} ms, of which "
        f"{1e3 * step_time.prefill_base_s:.0f} ms do not depend on its size; while answers run, a "
        f"chunk has at most {beside:.0f} tokens (decode.max_gap_ms)"
    )


def slots(flags: Mapping[str, Any]) -> str:
    """Report whether requests of the server that runs at the flags' address have long waited for a
    slot while memory is free."""
    port = _whole(flags, "port", 30000)
    url = f"http://{flags.get('host') or '127.0.0.1'}:{port}/server_info"
    try:
        info = ask(url, flags.get("api_key") or "", timeout_s=_PATIENCE_S)
        binds = any(state["sage"]["slots_bind"] for state in info["internal_states"])
        number = info["max_running_requests"]
    except (UserError, LookupError, TypeError):
        return Note("a server that runs at the flags' address can tell whether slots bind")
    if not binds:
        return "no request has long waited for a slot while memory is free"
    return Note(
        "requests have long waited for a slot while 40 % or more of the KV pool is free: raise "
        f"--max-running-requests, now {number}"
    )


def _whole(flags: Mapping[str, Any], name: str, default: int) -> int | None:
    """Return a flag's number, or None if no server could use it."""
    try:
        number = int(flags.get(name) or default)
    except ValueError:
        return None
    return number if abs(number) <= MOST else None


def flags(argv: Sequence[str], with_settings: bool) -> str:
    """Check that SGLang's own parser accepts the flags. with_settings: whether our settings can be
    read."""
    if not argv:
        return Note("none given; `sage-sched doctor FLAGS` checks those of a server")
    if not with_settings:
        return Note("not checked, because the settings cannot be read")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    printed = io.StringIO()
    do = "leave the flag out, or change its value"
    try:
        with _fault_of(Exception, do), contextlib.redirect_stderr(printed):
            server_args = prepare_server_args(with_policy(argv))
    except SystemExit as refusal:
        last = (printed.getvalue().strip().splitlines() or [""])[-1]
        raise FaultError(last if isinstance(refusal.code, int) else refusal.code, do) from None
    return f"accepted; --schedule-policy {server_args.schedule_policy}"
