"""What the prompts of waiting requests begin with."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.common import match_kv_cache

from patches.engine_types import Req, Scheduler
from sage_sched.job import Job


class Prompts:
    """Those of one pass, by position in the queue. Each question is answered when it is asked, as
    most never are."""

    def __init__(self, scheduler: Scheduler, served: Sequence[Req]) -> None:
        """served: requests that run, or are being chunked."""
        self._tree_cache = scheduler.tree_cache
        self._waiting = scheduler.waiting_queue
        self._served = served

    def cached_tokens(self, position: int) -> int:
        """As SGLang's policies that are aware of the radix tree find it out."""
        req = self._waiting[position]
        match_kv_cache(req, self._tree_cache)
        return req.num_matched_prefix_tokens

    def common_tokens(self, position: int, other: int | Job) -> int:
        """As the radix tree tells prompts apart: none if they differ in LoRA adapter or salt, or in
        what no token id says. See SchedulerView.common_tokens."""
        if self._tree_cache.disable:
            return 0
        one = self._waiting[position]
        two = self._waiting[other] if isinstance(other, int) else self._of(other)
        ids, other_ids = one.origin_input_ids, two.origin_input_ids
        cached_tokens = one.sage.job.cached_tokens
        # Most pairs are told apart by one token: this is asked often.
        if cached_tokens >= min(len(ids), len(other_ids)):
            return 0
        if ids[cached_tokens] != other_ids[cached_tokens]:
            return 0
        if (one.extra_key, one.cache_salt) != (two.extra_key, two.cache_salt):
            return 0
        if one.input_embeds is not None or two.input_embeds is not None:
            return 0
        return common_length(ids, other_ids)

    def _of(self, job: Job) -> Req:
        return next(req for req in self._served if req.sage.job is job)


def common_length(one: Sequence[int], two: Sequence[int]) -> int:
    """How many items two sequences begin with alike."""
    alike, differs = 0, min(len(one), len(two)) + 1  # the first so many are; so many are not
    size = 1
    while differs - alike > 1:
        size = min(size, differs - alike - 1)
        if one[alike : alike + size] == two[alike : alike + size]:
            alike, size = alike + size, 2 * size
        else:
            differs, size = alike + size, max(1, size // 2)
    return alike
