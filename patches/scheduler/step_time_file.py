"""Keeps learned step times for the next server of the same kind."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from patches.engine_types import Scheduler
from predictor_store.cached_file import cache_folder, read_own, replace_own
from sage_sched.app.config import StepTimeConfig, in_ms
from sage_sched.fields import parse_section
from sage_sched.steps import StepTime

logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 65_536


class StepTimeFile:
    """A file of learned step times in the cache folder, for the next server of the same kind. Only
    its owner can read it, and no link is followed. A useless file costs one log line."""

    def __init__(self, server: Mapping[str, str]) -> None:
        """server: the facts on which step times depend (see kind_of)."""
        self._server = dict(server)
        self._can_be_written = True
        name = hashlib.sha256(json.dumps(self._server, sort_keys=True).encode()).hexdigest()[:16]
        self._name = f"step-times-{name}.json"

    @property
    def path(self) -> Path:
        """The file's path. Raises OSError if the user has no cache folder."""
        return cache_folder() / self._name

    def read(self) -> StepTime | None:
        """Return the step times that an earlier server learned; None if there are no usable
        ones."""
        try:
            written = json.loads(read_own(self.path, _MAX_FILE_BYTES))
            if written["server"] != self._server:
                raise ValueError("it is for another kind of server")
            section = written["step_time"]
            parsed: StepTimeConfig = parse_section(StepTimeConfig, "step_time", section)
            return parsed.step_time()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("step times are learned anew: %s is unusable (%r)", self._name, error)
            return None

    def write(self, step_time: StepTime) -> None:
        """Write the step times. Never raises."""
        if not self._can_be_written:
            return
        written = {"server": self._server, "step_time": in_ms(step_time)}
        try:
            replace_own(self.path, (json.dumps(written, indent=2) + "\n").encode())
        except OSError as error:
            self._can_be_written = False
            logger.warning(
                "step times are not kept, because %s cannot be written: %s", self._name, error
            )


def kind_of(scheduler: Scheduler) -> dict[str, str]:
    """Return the facts on which a server's step times depend: its model and the hardware."""
    args: Any = scheduler.server_args
    device = torch.get_device_module(scheduler.device)
    hardware = (
        device.get_device_name()
        if hasattr(device, "get_device_name")
        else f"{os.cpu_count()} {os.uname().machine} cores"
    )
    names = (
        "model_path", "quantization", "kv_cache_dtype", "tp_size", "ep_size", "enable_dp_attention",
        "enable_lora", "speculative_algorithm", "speculative_num_draft_tokens",
    )  # fmt: skip
    about = {name: str(getattr(args, name)) for name in names}
    return about | {"dtype": str(scheduler.model_config.dtype), "hardware": hardware}
