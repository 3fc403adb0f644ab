"""Several HTTP processes (--tokenizer-worker-num): their hooks, and the worker that they share."""

from __future__ import annotations

import os
from typing import Any

from patches.compat import APP, APP_VARIABLE
from patches.hook import AFTER, Hook
from patches.http_types import ServerArgs
from predictor_store.service.supervisor import SharedWorker


def main_process_hooks() -> list[Hook]:
    """For the process that starts them; sets the environment that they inherit."""
    os.environ[APP_VARIABLE] = APP
    return router_hooks()


def router_hooks() -> list[Hook]:
    """Of the process that starts them."""
    router = "sglang.srt.managers.multi_tokenizer_mixin.MultiTokenizerRouter"
    return [Hook(f"{router}.__init__", AFTER, _after_router_init, ("server_args",))]


def _after_router_init(
    result: None, self: object, server_args: ServerArgs, *args: Any, **kw: Any
) -> None:
    # The schedulers are loading the model meanwhile; the HTTP processes come after them, and read
    # the settings that are left here.
    config = getattr(server_args, "_sage_config", None)
    if config is not None and not config.predictor.service:
        worker = SharedWorker(config)
        worker.start()
        server_args._sage_config = worker.config
