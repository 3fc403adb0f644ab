"""Checks that a probe fits the server, and installs it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel

from patches.compat import UnsupportedServerError
from patches.engine_types import Scheduler
from patches.failures import Failures
from patches.probe.recorder import Recorder
from patches.probe.scores import Probing
from patches.probe.tap import Tap
from patches.refusals import refuse
from predictor_store.cached_file import expanded
from predictor_store.probe.file import ProbeFile, fingerprint
from sage_sched.app.config import ProbeConfig, SageConfig, StepTimeConfig
from sage_sched.app.registry import policy_named
from sage_sched.scheduler import Scheduler as Core
from sage_sched.steps import ServerFacts

logger = logging.getLogger(__name__)

# Used only to ask a policy whether it needs a probe.
_ANY_SERVER = ServerFacts(1, 1, StepTimeConfig().step_time(), 0.0)
# The maximum number of recorded layers, evenly spaced from the first to the last but one.
_NUM_RECORDED = 6
# Features with which hidden states cannot be read, and why.
_REFUSALS = {
    "--enable-return-hidden-states": "SGLang would give its clients the states that are captured",
    "--speculative-algorithm": "SGLang shows no states of tokens that a draft proposed",
    "--enable-dp-attention": "it has not been tried",
    "--disaggregation-mode": "no server sees the states of all of a request",
}


def refuse_probe(server_args: Any, sage_config: SageConfig) -> None:
    """Raise UnsupportedServerError, before SGLang starts its processes, if the policy needs a probe
    and has none, or if the probe is not for this model."""
    name, config = server_args.schedule_policy, sage_config.probe
    policy = policy_named(name, sage_config.policy, _ANY_SERVER)
    if policy.traits.refiner is not None and not config.file:
        raise UnsupportedServerError(
            f"--schedule-policy {name} needs a probe: set probe.file (see docs/predictor.md for "
            f"how), or choose trail-prompt."
        )
    if not config.file and not config.record:
        return
    refuse(server_args, "[probe]", _REFUSALS)
    folder = Path(server_args.model_path)
    try:
        found, (num_layers, hidden_size) = fingerprint(folder), model_shape(folder)
        probe = _read(config)
    except (OSError, ValueError) as error:
        raise UnsupportedServerError(f"[probe]: {error}") from error
    if num_layers < 2:
        raise UnsupportedServerError(
            f"[probe]: {folder} has {num_layers} layer; the last one's states cannot be read."
        )
    if probe is None:
        return
    for what, of_probe, of_model in (
        ("fingerprint", probe.fingerprint, found),
        ("hidden size", probe.hidden_size, hidden_size),
    ):
        if of_probe != of_model:
            raise UnsupportedServerError(
                f"the probe {config.file} is of another model: its {what} is {of_probe}, that of "
                f"{folder} is {of_model}. Train one for this model (docs/predictor.md)."
            )
    if not 0 <= probe.layer < num_layers - 1:
        raise UnsupportedServerError(
            f"the probe {config.file} reads layer {probe.layer}, allowed: 0 to {num_layers - 2} of "
            f"the {num_layers} of {folder}."
        )


def _read(config: ProbeConfig) -> ProbeFile | None:
    return ProbeFile.read(expanded(config.file)) if config.file else None


def model_shape(folder: Path) -> tuple[int, int]:
    """Return the number of layers and the hidden size, from config.json. Raises OSError,
    ValueError."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        return int(config["num_hidden_layers"]), int(config["hidden_size"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder}/config.json gives no model size: {error!r}") from error


def recorded_layers(num_layers: int) -> list[int]:
    """Return the layers to record, from 0. The last one is never among them: SGLang does not
    capture its output."""
    number = min(_NUM_RECORDED, num_layers - 1)
    return sorted({round(i * (num_layers - 2) / max(1, number - 1)) for i in range(number)})


def install_tap(runner: Any, config: ProbeConfig, probing: Callable[[], Probing | None]) -> None:
    """Install the tap on this rank. Call this on every rank before graphs are captured."""
    model = runner.model
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        name = type(model).__name__
        raise UnsupportedServerError(f"[probe]: SGLang does not show hidden states of {name}.")
    num_layers, hidden_size = model_shape(Path(runner.server_args.model_path))
    recorded = recorded_layers(num_layers) if config.record else []
    tap = Tap(_read(config), recorded, hidden_size, runner.device, probing)
    model.set_eagle3_layers_to_capture(tap.layers)
    if get_parallel().tp_rank == 0:
        model.logits_processor.sage_tap = tap
        runner.sampling_observer = tap


def probing_of(
    scheduler: Scheduler, core: Core, config: ProbeConfig, failures: Failures
) -> Probing | None:
    """Return the scheduler's Probing; None if hidden states are not read."""
    if not config.is_on:
        return None
    recorder = None
    if config.record and get_parallel().tp_rank == 0:
        folder = Path(scheduler.server_args.model_path)
        num_layers, hidden_size = model_shape(folder)
        about = {"fingerprint": fingerprint(folder), "hidden_size": hidden_size}
        path, max_bytes = expanded(config.record), int(config.record_gib * 2**30)
        recorder = Recorder(path, max_bytes, recorded_layers(num_layers), about)
    return Probing(core, _read(config), recorder, failures)
