"""A stand-in for a GPU: streams do their work later, in any order that events allow.

Within `deferring`, every tensor operation of PyTorch is queued on the current stream. The seed
orders work that streams and events do not order, so a missing wait shows in the data.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_READS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero")


class Event:
    """A point in a stream. at_ms: when the device passed it; None if it has not yet."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._num_recorded = self._num_passed = 0
        self.at_ms: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._num_recorded += 1
        number = self._num_recorded

        def passed() -> None:
            self._num_passed, self.at_ms = number, self._device.now_ms

        (stream or self._device.current_stream()).add(passed)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current_stream()).wait_event(self)

    def query(self) -> bool:
        return self._num_passed >= self._num_recorded

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        self._device.num_syncs += 1
        self._device.work(until=self.query)

    def barrier(self) -> Callable[[], bool]:
        """Return whether the latest record so far has been passed."""
        number = self._num_recorded
        return lambda: self._num_passed >= number


class Stream:
    """Work in order. Each entry is a task, and whether it may be done yet. speed: how often tasks
    are done, compared to other streams."""

    def __init__(self, device: FakeDevice, speed: int) -> None:
        self._device, self.speed = device, speed
        self.queue = deque[tuple[Callable[[], bool], Callable[[], Any]]]()

    def add(self, work: Callable[[], Any], may_run: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((may_run, work))

    def wait_event(self, event: Event) -> None:
        self.add(lambda: None, event.barrier())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._device)
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class FakeDevice:
    """The result of torch.get_device_module. num_syncs: how often the host waited for the device.
    now_ms: the device's clock, which works_for() moves."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._streams: list[Stream] = []
        self._current = [self.Stream()]
        self.num_syncs = 0
        self.now_ms = 0.0

    def Stream(self, priority: int = 0) -> Stream:  # noqa: N802
        self._streams.append(Stream(self, self._random.choice((1, 8))))
        return self._streams[-1]

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()

    def synchronize(self, device: Any = None) -> None:
        self.num_syncs += 1
        self.work()

    def works_for(self, stream: Stream, milliseconds: float) -> None:
        """Queue work of this length."""
        stream.add(lambda: setattr(self, "now_ms", self.now_ms + milliseconds))

    def work(self, num_steps: int | None = None, until: Callable[[], bool] | None = None) -> None:
        """Do queued work: all of it, or num_steps pieces, or until something holds."""
        while num_steps != 0 and not (until and until()):
            ready = [s for s in self._streams if s.queue and s.queue[0][0]()]
            if not ready:
                assert not any(s.queue for s in self._streams), "streams wait for each other"
                return
            with _disable_current_modes():
                (stream,) = self._random.choices(ready, [one.speed for one in ready])
                stream.queue.popleft()[1]()
            num_steps = None if num_steps is None else num_steps - 1

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Queue all tensor operations on the current stream."""
        with _Deferred(self):
            yield


class _Deferred(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stream = self._device.current_stream()
        if str(func).startswith(_READS):
            stream.synchronize()
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            stream.add(lambda: func(*args, **kwargs))
            changed = [a for a, of in zip(args, func._schema.arguments, strict=False)
                       if of.alias_info and of.alias_info.is_write]  # fmt: skip
            return kwargs["out"] if "out" in kwargs else changed[0]
        result = func(*args, **kwargs)
        if torch.is_tensor(result) and not func.is_view and result.numel():
            # Its content follows. Until then the memory is arbitrary.
            stream.add(lambda: result.copy_(func(*args, **kwargs)))
        return result
