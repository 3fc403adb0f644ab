"""What we read of SGLang's objects in a scheduler process most (SGLang 0.5.23).

What is not named here has no type: mypy does not follow SGLang's own. `sage` is what we keep on one
of them; nothing of ours is imported here, so it has none either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class _Theirs(Protocol):
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...


class Req(_Theirs, Protocol):
    """managers/schedule_batch.py"""

    sage: Any  # patches.scheduler.request.RequestState
    rid: str
    output_ids: Sequence[int]
    cached_tokens: int
    num_matched_prefix_tokens: int
    priority: int | None
    seqlen: int

    def finished(self) -> bool: ...


class Batch(_Theirs, Protocol):
    """ScheduleBatch, managers/schedule_batch.py"""

    reqs: list[Req]
    prefix_lens: Sequence[int]
    extend_lens: Sequence[int]
    batch_is_full: bool

    def is_empty(self) -> bool: ...
    def new_tokens_required_next_decode(self) -> int: ...


class Scheduler(_Theirs, Protocol):
    """managers/scheduler.py"""

    sage: Any  # patches.scheduler.state.SchedulerState
    waiting_queue: list[Req]
    running_batch: Batch
    chunked_req: Req | None
    chunked_prefill_size: int | None
    max_prefill_tokens: int
    page_size: int
    device: str
