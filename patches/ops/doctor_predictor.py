"""What `sage-sched doctor` looks at of predictions: the store, the predictor, the tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from patches.ops.finding import Finding, fault, fine
from predictor_store.cached_file import cache_folder
from predictor_store.data.files import DatasetError
from predictor_store.data.warm import load_tokenizer
from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.predict.regression import GeneralLength
from predictor_store.service.link import PredictorError, connect_worker
from predictor_store.store import lock
from predictor_store.store.file import StoreError
from predictor_store.store.store import Store, file_of, folder_of
from sage_sched.config import SageConfig

_LEAST_FREE_BYTES = 200e6


def store(config: SageConfig) -> Iterator[Finding]:
    """Whether it can be read, by us and now, and written to."""
    if config.predictor.service:
        yield Finding("note", "store", "the predictor service's own")
        return
    folder = folder_of(config.store)
    exists = next(path for path in (folder, *folder.parents) if path.exists())
    can_write = exists.is_dir() and os.access(exists, os.W_OK | os.X_OK)
    if config.store.on_disk and not can_write:
        yield fault(
            "store", f"{exists} is no folder that this user may write to",
            "name another in store.path, or set store.on_disk = false",
        )  # fmt: skip
        return
    encoder = config.predictor.encoder
    if file_of(folder).exists():
        try:
            kept = replace(config.store, on_disk=False)
            with Store(kept, fingerprint(encoder), dimension(encoder)) as opened:
                num_records = len(opened.load())
        except StoreError as error:
            yield fault(
                "store", error, f"move {folder} away (the server begins a new one), or name "
                "another in store.path",
            )  # fmt: skip
            return
    else:
        num_records = 0
    if not config.store.on_disk:
        yield fine("store", f"{num_records} records in {folder}, which stays as it is")
        return
    if (pid := lock.holder(folder)) is not None:
        yield fault(
            "store", f"{folder} is in use by process {pid}",
            "end that server, or give this one another store.path; several servers share one "
            "predictor by predictor.service",
        )  # fmt: skip
        return
    if (free := shutil.disk_usage(exists).free) < _LEAST_FREE_BYTES:
        yield fault("store", f"{free / 1e6:.0f} MB are free on its disk", "make room there")
        return
    yield fine("store", f"{num_records} records in {folder}")


def predictor(config: SageConfig) -> Iterator[Finding]:
    """Whether it can be asked."""
    if config.predictor.service:
        try:
            connect_worker(config, "").close()
        except (PredictorError, StoreError, ValueError) as error:
            yield fault(
                "predictor", error, "start the service, or correct predictor.service and its token"
            )
            return
        yield fine("predictor", f"the service at {config.predictor.service} answers")
        return
    encoder = config.predictor.encoder
    try:
        Embedder(encoder, num_threads=1).embed(["Is anybody there?"])
        GeneralLength.shipped(encoder)
    except Exception as error:  # a missing package, a missing or damaged file of the encoder
        yield fault(
            "predictor", f"the encoder {encoder!r} cannot be loaded: {error!r}",
            f"install sage-sched anew; if {cache_folder()} holds damaged files, remove it",
        )  # fmt: skip
        return
    yield fine("predictor", f"encoder {encoder!r} works")


def model(path: str | None) -> Iterator[Finding]:
    """Whether its prompts can be read. path: --model-path."""
    if path is None:
        return
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith(("/", ".", "~")):
            yield fault("model", f"there is no {path}", "correct --model-path")
        else:
            yield Finding("note", "model", f"{path} is no folder here: SGLang fetches it")
        return
    if not (folder / "config.json").exists():
        yield fault("model", f"{path} has no config.json", "name the model's own folder")
        return
    try:
        load_tokenizer(str(folder))
    except DatasetError as error:
        yield fault(
            "model", error, "put the model's tokenizer files there: without one prompts cannot "
            "be read",
        )  # fmt: skip
        return
    yield fine("model", str(folder))
