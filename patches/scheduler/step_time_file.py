"""Step times that outlive a server, for the next one of the same model on the same hardware."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from patches.engine_types import Scheduler
from predictor_store.cached_file import cache_folder, read_own, replace_own
from sage_sched.config import StepTimeConfig, in_ms
from sage_sched.fields import parse_section
from sage_sched.steps.time import StepTime

logger = logging.getLogger(__name__)

_MAX_BYTES = 65_536


class StepTimeFile:
    """A file for each kind of server, beside the folder that a store has by default.

    Of its owner alone, replaced as a whole, and never reached through a link. What is wrong with it
    costs one log line.
    """

    def __init__(self, server: Mapping[str, str]) -> None:
        """server: what step times depend on, see kind_of."""
        self._server = dict(server)
        self._can_be_written = True
        name = hashlib.sha256(json.dumps(self._server, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"step-times-{name}.json"

    def read(self) -> StepTime | None:
        """What an earlier server has learned; None if there is nothing that can be used."""
        try:
            written = json.loads(read_own(self.path, _MAX_BYTES))
            if written["server"] != self._server:
                raise ValueError("it is of another server")
            parsed: StepTimeConfig = parse_section(
                StepTimeConfig, "step_time", written["step_time"]
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("step times are learned anew, as %s is no use: %r", self.path, error)
            return None
        return parsed.step_time()

    def write(self, step_time: StepTime) -> None:
        """For the next server. Never raises."""
        if not self._can_be_written:
            return
        written = {"server": self._server, "step_time": in_ms(step_time)}
        try:
            replace_own(self.path, (json.dumps(written, indent=2) + "\n").encode())
        except OSError as error:
            self._can_be_written = False
            logger.warning("step times are not kept, as %s cannot be written: %s", self.path, error)


def kind_of(scheduler: Scheduler) -> dict[str, str]:
    """What a server's step times depend on: its model and the hardware."""
    args: Any = scheduler.server_args
    device = torch.get_device_module(scheduler.device)
    hardware = (
        device.get_device_name()
        if hasattr(device, "get_device_name")
        else f"{os.cpu_count()} {os.uname().machine} cores"
    )
    return {
        "model": str(args.model_path),
        "dtype": str(scheduler.model_config.dtype),
        "quantization": str(args.quantization),
        "kv_cache_dtype": str(args.kv_cache_dtype),
        "tp_size": str(args.tp_size),
        "hardware": hardware,
    }
