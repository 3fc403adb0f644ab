"""Implements the device clock, an SGLang plugin that ends each step when a modelled device would.

Server, scheduler, HTTP, KV pool and a small model are real. The model computes on the host, and the
scheduler sees the result when the modelled device would be done. Under overlap the scheduler's own
work hides behind a step, as it does on a GPU.

install() puts the plugin into a folder of its own, for the servers that the bench starts. The
product has no switch for it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.engines.server import plugins
from bench.simulator.host import NO_HOST, Host
from sage_sched.app.registry import policy_names
from sage_sched.steps import StepTime

_MODEL_FILE = "BENCH_DEVICE_CLOCK"
STATE = "device_clock"
_MANAGERS = "sglang.srt.managers"
_ALLOCATORS = (
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator",
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator",
)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """The step times of a device, and of its KV moves.

    swap_token_s: seconds for which a token's KV, on its way to host memory or back, delays the
        device. A copy that hides behind compute does not count.
    host: of the modelled server. It works while the real host does, so the slower of the two
        counts. Plans, and work after a move, are left to the real host.
    """

    step_time: StepTime
    swap_token_s: float
    host: Host = NO_HOST

    def times(self, factor: float) -> DeviceModel:
        """Return the model with all times multiplied by a factor."""
        coefficients = {name: s * factor for name, s in asdict(self.step_time).items()}
        host = self.host.times(factor)
        return DeviceModel(StepTime(**coefficients), self.swap_token_s * factor, host)

    def step_s(self, batch: Any) -> float:
        """Return the seconds of a step (sglang/srt/managers/schedule_batch.py, ScheduleBatch)."""
        if not batch.forward_mode.is_extend_without_speculative():
            kv_tokens = sum(req.kv.kv_committed_len for req in batch.reqs)
            return self.step_time.decode_s(len(batch.reqs), kv_tokens)
        num_decoding = len(batch.decoding_reqs) if batch.forward_mode.is_mixed() else 0
        num_prefills = len(batch.reqs) - num_decoding
        cached, new = batch.prefix_lens[:num_prefills], batch.extend_lens[:num_prefills]
        pairs = sum(n * (c + n / 2) for c, n in zip(cached, new, strict=True))
        kv_tokens = sum(batch.prefix_lens[num_prefills:])
        return self.step_time.mixed_s(num_prefills, sum(new), pairs, num_decoding, kv_tokens)


@dataclass(slots=True)
class ClockStats:
    """Counts of a device. late_s: the total delay by the host (see DeviceClock)."""

    num_steps: int = 0
    device_s: float = 0.0
    num_late: int = 0
    late_s: float = 0.0
    num_moves: int = 0
    moved_s: float = 0.0


class DeviceClock:
    """The time line of one device.

    Its host is late if it computes a step after the device would have finished it. It is also late
    if it launches a step, while there is work, after the step before has ended.

    now, cpu, sleep: the clock, this thread's CPU seconds, and how to wait.
    """

    def __init__(
        self,
        model: DeviceModel,
        now: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.stats = ClockStats()
        self._model = model
        self._now, self._cpu, self._sleep = now, cpu, sleep
        self._free_s = now()
        self._cpu_at_wake_s = cpu()

    def run(
        self,
        batch: Any,
        compute: Callable[[], Any],
        *,
        after_idle: bool,
        overlaps: bool,
        host_s: float = 0.0,
    ) -> tuple[Any, float]:
        """Launch a step, and return the result of compute and when the device is done with it.

        host_s: the time that the modelled host takes for a step.
        overlaps: whether steps are launched while the one before runs. If not, the host's own work
            between two steps does not count as late, but time without CPU does.
        """
        work_s = max(self._model.step_s(batch), host_s)
        started_s = self._now()
        gap_s = 0.0 if after_idle else max(0.0, started_s - self._free_s)
        if not overlaps:
            gap_s = max(0.0, gap_s - (self._cpu() - self._cpu_at_wake_s))
        done_s = max(started_s, self._free_s) + work_s
        result = compute()
        computed_s = self._now()
        late_s = gap_s + max(0.0, computed_s - done_s)
        self._free_s = max(done_s, computed_s)
        self.stats.num_steps += 1
        self.stats.device_s += work_s
        self.stats.num_late += late_s > 0
        self.stats.late_s += late_s
        return result, self._free_s

    def wait_until(self, done_s: float) -> None:
        """Wait for a step's result."""
        self._sleep_until(done_s)
        self._cpu_at_wake_s = self._cpu()

    def move(self, num_tokens: int, copy: Callable[[], Any]) -> Any:
        """Copy the KV of num_tokens, either way. The host waits for the copy. The device begins it
        after the running step and earlier copies."""
        started_s = self._now()
        move_s = self.hold_up(num_tokens)
        result = copy()
        self._sleep_until(started_s + move_s)
        return result

    def hold_up(self, num_tokens: int) -> float:
        """Start a copy that runs in parallel with compute, either way. Return its seconds. The host
        does not wait for it."""
        move_s = num_tokens * self._model.swap_token_s + self._model.host.move_s
        self._free_s = max(self._free_s, self._now()) + move_s
        self.stats.num_moves += 1
        self.stats.moved_s += move_s
        return move_s

    def _sleep_until(self, end_s: float) -> None:
        left_s = end_s - self._now()
        if left_s > 0:
            self._sleep(left_s)


def install(folder: Path, model: DeviceModel) -> dict[str, str]:
    """Install the clock for servers with this environment."""
    found = plugins.install(folder, __name__)
    model_file = (folder / "model.json").absolute()
    model_file.write_text(json.dumps(asdict(model)), encoding="utf-8")
    return found | {_MODEL_FILE: str(model_file)}


def register() -> None:
    """Install the clock in this process. This is an entry point of the group sglang.srt.plugins.
    Trap: SGLang only logs failures here. The bench notices a failure because the server's state
    lacks the clock."""
    if f"{_MANAGERS}.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from bench.engines.clock import light_model
    from patches.scheduler import step_meter, swap_meter
    from patches.scheduler.kv_arena import KvArena

    light_model.register()
    written = json.loads(Path(os.environ[_MODEL_FILE]).read_text(encoding="utf-8"))
    host = Host(**written["host"])
    model = DeviceModel(StepTime(**written["step_time"]), written["swap_token_s"], host)
    clock = DeviceClock(model)
    seen = SimpleNamespace(device_s=0.0)  # device_s as of the last result

    def around_run_batch(original: Any, self: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        if batch.forward_mode.is_prebuilt() or batch.forward_mode.is_idle():
            return original(self, batch, *args, **kw)
        any_waits = len(self.waiting_queue) > 0 and self.schedule_policy in policy_names()
        num_running = len(self.running_batch.reqs)
        result, done_s = clock.run(
            batch,
            lambda: original(self, batch, *args, **kw),
            after_idle=self._sched_idled,
            overlaps=self.enable_overlap,
            host_s=host.work_s(num_running, any_waits=any_waits),
        )
        result.device_done_s, result.device_s = done_s, clock.stats.device_s
        return result

    def before_process(self: Any, batch: Any, result: Any, *args: Any, **kw: Any) -> None:
        clock.wait_until(getattr(result, "device_done_s", 0.0))
        seen.device_s = getattr(result, "device_s", seen.device_s)

    def around_copy_out(original: Any, self: Any, indices: Any, *args: Any, **kw: Any) -> Any:
        return clock.move(len(indices), lambda: original(self, indices, *args, **kw))

    def around_copy_back(
        original: Any, self: Any, copy: Any, indices: Any, *args: Any, **kw: Any
    ) -> Any:
        return clock.move(len(indices), lambda: original(self, copy, indices, *args, **kw))

    def copy_beside(arena: Any, slots: Any) -> Any:
        clock.hold_up(len(slots))
        return copy_out(arena, slots)

    def put_back_beside(arena: Any, copy: Any, *given: Any) -> None:
        clock.hold_up(copy.num_tokens)
        put_back(arena, copy, *given)

    def after_internal_state(result: Any, self: Any, recv_req: Any) -> None:
        result.internal_state[STATE] = asdict(clock.stats) | {"cpu_s": time.process_time()}

    # For our meters, steps end when their results are seen, and take the device's time, even if the
    # host was late. A copy takes the device's time, not the host's.
    step_meter.ends_with_launch = lambda device: False
    step_meter.time = SimpleNamespace(perf_counter=lambda: seen.device_s)  # type: ignore[attr-defined,assignment]
    swap_meter.time = SimpleNamespace(perf_counter=lambda: clock.stats.moved_s)  # type: ignore[attr-defined,assignment]
    copy_out, put_back = KvArena.copy_out, KvArena.put_back
    KvArena.copy_out, KvArena.put_back = copy_beside, put_back_beside  # type: ignore[assignment,method-assign]
    scheduler = f"{_MANAGERS}.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", around_run_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.process_batch_result", before_process, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.get_internal_state", after_internal_state, HookType.AFTER)
    for allocator in _ALLOCATORS:
        HookRegistry.register(f"{allocator}.get_cpu_copy", around_copy_out, HookType.AROUND)
        HookRegistry.register(f"{allocator}.load_cpu_copy", around_copy_back, HookType.AROUND)
