"""A scheduler of SGLang with our plugin, in this process, that follows a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import yaml
from sglang.srt.disaggregation import prefill
from sglang.srt.disaggregation.utils import TransferBackend
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import BatchTokenIDOutput, GetInternalStateReq
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import PortArgs, prepare_server_args

from patches.json_lines import JsonLines
from patches.scheduler import host_memory, kv_copy, step_meter, view
from patches.scheduler.kv_arena import KvArena
from sage_sched import step_learner
from tests.patches.recorded.device import Clock, Device
from tests.patches.recorded.records import Records
from tests.patches.recorded.situations import Situation

_FLAGS = (
    "--model-path", "model", "--load-format", "dummy", "--dtype", "float32", "--device", "cpu",
    "--attention-backend", "torch_native", "--mem-fraction-static", "0.5", "--random-seed", "1",
    "--enable-metrics", "--log-level", "error", "--max-total-tokens", "2000",
)  # fmt: skip
# The time of a turn of the loop besides its step, and of a turn without a step.
_TURN_S, _IDLE_S = 0.0002, 0.01
_MOST_TURNS = 3000
_TURNS_A_LOOK = 25
_HOST_BYTES = 2**30
_LEARNING_STEPS = 24
# Longer than the interval at which series are updated.
_LAST_S = 3.0


class RecordedServer:
    """A scheduler that follows a script. records: its observable behaviour."""

    def __init__(self, folder: Path, situation: Situation) -> None:
        """folder: for its files. The model is in `model`."""
        self._folder = folder
        self._turns = count(1)
        self._script = situation.script()
        self._clock = Clock()
        self.records = Records(self._clock)
        self._device = Device(self._clock, situation.moves_a_failure)
        self._clock.install()
        self._replace(situation.moves_a_failure is not None)
        config = folder / "settings.yaml"
        config.write_text(yaml.safe_dump(situation.settings))
        files = ("--sage-config", str(config), "--sage-trace", str(folder / "trace"))
        flags = ("--schedule-policy", situation.policy, *situation.flags)
        args = prepare_server_args([*_FLAGS, *files, *flags])
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = sglang_scheduler.Scheduler(args, PortArgs.init_new(args))
        self._follow()
        if (most := situation.most_adapters) is not None:
            self._adapt(most)

    def _replace(self, can_fail: bool) -> None:
        """Install the device and the script in this process, and record the agreements of ranks."""
        TpModelWorker.forward_batch_generation = lambda worker, batch, **_: self._ran(worker, batch)
        SchedulerRequestReceiver._pull_raw_reqs = lambda _: self._pulled()
        # Without the thread that writes the file.
        JsonLines.add = lambda _, line: self.records.lines["trace"].append(json.dumps(line))
        GroupCoordinator.broadcast_object = self._agreed(GroupCoordinator.broadcast_object)
        of_all, fails, turns = kv_copy.least, self._device.fails, count(1)

        def least(scheduler: Any, number: int) -> int:  # another rank may fail
            return 0 if can_fail and next(turns) % 5 == 0 else of_all(scheduler, number)

        kv_copy.least = self._agreed(least)
        evict = kv_copy.evict_from_tree_cache
        kv_copy.evict_from_tree_cache = lambda *given: fails() or evict(*given)
        host_memory.free_bytes = lambda: _HOST_BYTES
        # A prefill server sends its KV nowhere.
        fake = partial(prefill.get_kv_class, TransferBackend.FAKE)
        prefill.get_kv_class = lambda backend, kind: fake(kind)
        step_learner.INTERVAL_STEPS = _LEARNING_STEPS
        step_meter.ends_with_launch = lambda _: False  # as on a GPU
        for allocator in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
            allocator.get_cpu_copy = self._device.moving(allocator.get_cpu_copy, len)
            load = self._device.moving(allocator.load_cpu_copy, lambda copy, slots: len(slots))
            allocator.load_cpu_copy = load
        KvArena.copy_out = self._device.moving(KvArena.copy_out, len)
        put_back = self._device.moving(KvArena.put_back, lambda copy, *others: copy.num_tokens)
        KvArena.put_back = put_back
        for name in ("backup_kv_cache", "restore_kv_cache"):
            copy = getattr(UnifiedRadixCache, name)
            copy = self._device.moving(copy, lambda req, *others: req.seqlen)
            setattr(UnifiedRadixCache, name, copy)

    def _follow(self) -> None:
        """Record the scheduler's messages to other processes, and let it wait for the device."""
        scheduler: Any = self.scheduler
        poll, process = scheduler._poll_timeout_aborts, scheduler.process_batch_result

        def processed(batch: Any, result: Any, *given: Any) -> None:
            self._device.wait(result)
            process(batch, result, *given)

        scheduler._poll_timeout_aborts = lambda: self._told(poll())
        scheduler.process_batch_result = processed
        for name in ("send_to_tokenizer", "send_to_detokenizer"):
            getattr(scheduler.ipc_channels, name).send_output = self._sent

    def _adapt(self, most: int) -> None:
        """Pretend that a batch has room for this number of adapters. A decode server loads them
        during steps."""

        def has_room(req: Any, beside: set[str]) -> bool:
            self.records.add("told", "adapter", req.rid)
            return len({req.lora_id, *beside}) <= most

        scheduler: Any = self.scheduler
        scheduler.enable_lora, scheduler.can_schedule_lora_req = True, has_room
        scheduler.enable_lora_overlap_loading = view.only_decodes(scheduler)
        runner = scheduler.tp_worker.model_runner
        runner.lora_manager = SimpleNamespace(validate_lora_batch=lambda ids: len(ids) <= most)

    def run(self) -> None:
        """Give the scheduler the script's messages at their turns of the loop, until all is
        done."""
        self.scheduler.run_event_loop()
        self._clock.passes(_LAST_S)
        self.scheduler._poll_timeout_aborts()
        self._look()
        self.records.kept(self._folder)

    def _pulled(self) -> list[Any]:
        turn = next(self._turns)
        self._clock.passes(_IDLE_S if self.scheduler._sched_idled else _TURN_S)
        if turn > max(self._script) and self.scheduler.is_fully_idle():
            self.scheduler.gracefully_exit = True
        assert turn < _MOST_TURNS, "some request never ends"
        if turn % _TURNS_A_LOOK == 0:
            self._look()
        return [make(self._clock.now_s) for make in self._script.get(turn, ())]

    def _ran(self, worker: Any, batch: Any) -> Any:
        assert not view.swapped(batch.reqs), "a copy of a running request is kept"
        self.records.ran(batch)
        return self._device.launch(worker, batch)

    def _told(self, messages: list[Any]) -> list[Any]:
        """Record rank 0's broadcasts."""
        for message in messages:
            self.records.add("told", type(message).__name__, msgspec.structs.asdict(message))
        return messages

    def _agreed(self, agree: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(of: Any, value: Any, *given: Any, **kw: Any) -> Any:
            self.records.add("told", agree.__name__, value)
            return agree(of, value, *given, **kw)

        return recorded

    def _look(self) -> None:
        """Record /server_info, /v1/loads and /metrics."""
        asked = GetInternalStateReq()
        self.records.add("stats", self.scheduler.get_internal_state(asked).internal_state["sage"])
        load = self.scheduler.load_inquirer.get_loads().to_dict()
        self.records.add("loads", load["num_running_reqs"], load.get("sage"))
        self.records.scraped()

    def _sent(self, output: Any, asked: Any = None) -> None:
        if isinstance(output, BatchTokenIDOutput):
            self.records.answered(output)
        else:
            self.records.add("outputs", type(output).__name__, msgspec.structs.asdict(output))
