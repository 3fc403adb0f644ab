"""A scheduler of SGLang with our plugin, in this process: driven by a script, and recorded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import yaml
from prometheus_client import REGISTRY
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import BatchTokenIDOutput, GetInternalStateReq
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import PortArgs, prepare_server_args

from patches.json_lines import JsonLines
from patches.scheduler import host_memory, step_meter
from patches.series import SERIES
from tests.patches.recorded.asks import Script
from tests.patches.recorded.device import Clock, Device

# The time of a turn of the loop besides its step, and of a turn without a step.
_TURN_S, _IDLE_S = 0.0002, 0.01
_MOST_TURNS = 3000
_TURNS_A_LOOK = 25
_HOST_BYTES = 2**30
# Longer than the interval at which series are brought up to date.
_LAST_S = 3.0
_FLAGS = (
    "--model-path", "model", "--load-format", "dummy", "--dtype", "float32", "--device", "cpu",
    "--attention-backend", "torch_native", "--mem-fraction-static", "0.5", "--random-seed", "1",
    "--enable-metrics", "--log-level", "error",
)  # fmt: skip
_SHOWN = (
    "finished_reasons", "output_ids", "prompt_tokens", "completion_tokens", "cached_tokens",
    "retraction_counts",
)  # fmt: skip
_STAMPS = (
    "wait_queue_entry_time", "forward_entry_time", "prefill_finished_time", "completion_time"
)  # fmt: skip


class RecordedServer:
    """records: what an operator can see, as lines of text by kind."""

    def __init__(self, folder: Path, flags: Sequence[str], settings: Mapping[str, Any]) -> None:
        """folder: for its files. The model is in `model`."""
        self.records: defaultdict[str, list[str]] = defaultdict(list)
        self._folder = folder
        self._turns = count(1)
        self._script: Script = {}
        self._clock = Clock()
        self._device = Device(self._clock, self._ran)
        self._clock.install()
        self._replace()
        config = folder / "settings.yaml"
        config.write_text(yaml.safe_dump(settings))
        files = ("--sage-config", str(config), "--sage-trace", str(folder / "trace"))
        args = prepare_server_args([*_FLAGS, *files, *flags])
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = sglang_scheduler.Scheduler(args, PortArgs.init_new(args))
        for name in ("send_to_tokenizer", "send_to_detokenizer"):
            getattr(self.scheduler.ipc_channels, name).send_output = self._sent

    def _replace(self) -> None:
        """Put in the clock, the device and the script, in this process."""
        device: Any = self._device
        TpModelWorker.forward_batch_generation = lambda *given, **_: device.forward(*given)
        SchedulerRequestReceiver._pull_raw_reqs = lambda _: self._pulled()
        # Without the thread that writes the file.
        JsonLines.add = lambda _, line: self.records["trace"].append(json.dumps(line))
        host_memory.free_bytes = lambda: _HOST_BYTES
        step_meter.ends_with_launch = lambda _: False  # as on a GPU
        for allocator in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
            allocator.get_cpu_copy = device.moving(allocator.get_cpu_copy, 0)
            allocator.load_cpu_copy = device.moving(allocator.load_cpu_copy, 1)

    def run(self, script: Script) -> None:
        """Give the scheduler what the script has, by the turns of its loop, until all is done."""
        self._script = script
        self.scheduler.run_event_loop()
        self._clock.passes(_LAST_S)
        self.scheduler._poll_timeout_aborts()
        self._look("at the end")
        self.records["metrics"] += sorted(_series())
        for file in sorted(self._folder.glob("**/*.json")):
            kept = json.loads(file.read_text())
            kept["server"]["hardware"] = "any"
            self.records["files"].append(_rounded(kept))

    def _pulled(self) -> list[Any]:
        turn = next(self._turns)
        self._clock.passes(_IDLE_S if self.scheduler._sched_idled else _TURN_S)
        if turn > max(self._script) and self.scheduler.is_fully_idle():
            self.scheduler.gracefully_exit = True
        assert turn < _MOST_TURNS, "some request never ends"
        if turn % _TURNS_A_LOOK == 0:
            self._look(turn)
        return [make(self._clock.now_s) for make in self._script.get(turn, ())]

    def _look(self, when: object) -> None:
        """Record what /server_info and /v1/loads show."""
        state = self.scheduler.get_internal_state(GetInternalStateReq()).internal_state["sage"]
        self._add("stats", when, _rounded(state))
        load = self.scheduler.load_inquirer.get_loads().to_dict()
        self._add(
            "loads", when, _rounded({"running": load["num_running_reqs"], **load.get("sage", {})})
        )

    def _ran(self, batch: Any) -> None:
        requests = [req.rid for req in batch.reqs]
        if batch.forward_mode.is_extend():
            extents = zip(requests, batch.prefix_lens, batch.extend_lens, strict=True)
            requests = [f"{rid}:{cached}+{new}" for rid, cached, new in extents]
        self._add("steps", batch.forward_mode.name, *requests)

    def _sent(self, output: Any, asked: Any = None) -> None:
        if not isinstance(output, BatchTokenIDOutput):
            self._add("outputs", type(output).__name__, msgspec.structs.asdict(output))
            return
        for place, rid in enumerate(output.rids):
            shown = {name: getattr(output, name)[place] for name in _SHOWN}
            shown |= {name: getattr(output.time_stats[place], name) for name in _STAMPS}
            info = output.customized_info or {}
            shown |= {key: values[place] for key, values in info.items()}
            self._add("outputs", rid, _rounded(shown))

    def _add(self, kind: str, *parts: object) -> None:
        self.records[kind].append(" ".join([f"{self._clock.now_s:.6f}", *map(str, parts)]))


def _series() -> Iterator[str]:
    """The series of ours on /metrics."""
    for family in REGISTRY.collect():
        if family.name.startswith("sage:"):
            for name, labels, value, *_ in family.samples:
                if not name.endswith("_created"):
                    own = {
                        label: labels[label] for label in SERIES[name.removeprefix("sage:")].labels
                    }
                    yield f"{name} {own} {value:.6g}"


def _rounded(value: Any) -> str:
    """Return JSON with numbers to six digits: others may round sums otherwise."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, dict):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, str) or value is None or isinstance(value, int):
            return value
        return [plain(each) for each in value]

    return json.dumps(plain(value))
