"""Lists a scheduler's requests by state, on one server or on separate prefill and decode servers,
and collects the facts of a pass: SGLang's scheduler as the core sees it (SchedulerView)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from sglang.srt.mem_cache.common import match_kv_cache

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.jobs import Jobs
from sage_sched.job import Job
from sage_sched.scheduler import Scheduler as Core
from sage_sched.steps import ServerFacts
from sage_sched.view import Holding, SchedulerView


def only_prefills(scheduler: Scheduler) -> bool:
    """Whether this server's requests move to a decode server with their first token."""
    return bool(scheduler.server_args.disaggregation_mode == "prefill")


def only_decodes(scheduler: Scheduler) -> bool:
    """Whether the KV of this server's prompts comes from a prefill server."""
    return bool(scheduler.server_args.disaggregation_mode == "decode")


def waiting(scheduler: Scheduler) -> list[Req]:
    """Return the requests that a plan puts in order.

    On a decode server these are swapped out, or their prompts have no room yet. If preemption is
    off there, SGLang alone resumes the requests that it retracts.
    """
    if not scheduler.sage.only_decodes:
        return scheduler.waiting_queue
    queue = scheduler.disagg_decode_prealloc_queue
    ready = [entry.req for entry in queue.queue if entry.waiting_for_input]
    return ready if scheduler.sage.preemption is None else [*queue.retracted_queue, *ready]


def is_swapped(req: Req) -> bool:
    """Whether a waiting request's KV is in host memory."""
    return req.kv.retraction_backup is not None


def swapped(waiting: Iterable[Req]) -> list[Req]:
    """Return the requests whose KV is in host memory, in order."""
    return [req for req in waiting if is_swapped(req)]


def in_host_memory(scheduler: Scheduler) -> list[Req]:
    """Return the waiting requests whose KV is in host memory, in the order of the queue."""
    return swapped(waiting(scheduler))


def held(scheduler: Scheduler) -> list[Req]:
    """Return the requests that hold KV but do not run yet: the KV of their prompts is on its way,
    or has arrived."""
    if not scheduler.sage.only_decodes:
        return []
    on_the_way = [entry.req for entry in scheduler.disagg_decode_transfer_queue.queue]
    return [*scheduler.waiting_queue, *on_the_way]


def unseen(scheduler: Scheduler) -> list[Req]:
    """Return the requests that no plan sees: the two servers are not connected for them yet, or
    their KV is being sent."""
    if only_decodes(scheduler):
        queue = scheduler.disagg_decode_prealloc_queue.queue
        return [entry.req for entry in queue if not entry.waiting_for_input]
    if only_prefills(scheduler):
        sent: list[Req] = scheduler.disagg_prefill_inflight_queue
        return [*scheduler.disagg_prefill_bootstrap_queue.queue, *sent]
    return []


def view_of(scheduler: Scheduler, running_batch: Batch, server: ServerFacts) -> SchedulerView:
    """Return the facts that a pass may use."""
    state = scheduler.sage
    core: Core = state.core
    jobs: Jobs = state.jobs
    preemption, chunked = state.preemption, scheduler.chunked_req
    on_device, queue = [*running_batch.reqs, *held(scheduler)], waiting(scheduler)
    running = jobs.running(on_device)
    jobs.follow(queue)
    room = room_tokens(scheduler)
    if chunked is not None:
        chunked.sage.job.prefill(chunked.prefix_len)
    # A dict, because sets would have different orders on different ranks.
    in_host = dict.fromkeys(req.sage.job for req in swapped(jobs.begun))
    host_free_tokens = 0
    if preemption is not None:
        in_host_tokens = sum([job.input_tokens + job.generated_tokens for job in in_host])
        host_free_tokens = preemption.host_pool_tokens - in_host_tokens
    served = running_batch.reqs if chunked is None else [*running_batch.reqs, chunked]
    return SchedulerView(
        now_s=core.now_s,
        served_tokens=core.served_tokens,
        num_arrivals=num_arrivals(scheduler),
        waiting=jobs.waiting,
        swapped=in_host,
        running=running,
        chunked=None if chunked is None else chunked.sage.job,
        batch_is_full=is_full(scheduler, running_batch),
        free_slots=free_slots(scheduler, running_batch),
        room_tokens=room,
        locked_tokens=scheduler.max_total_num_tokens - room,
        host_free_tokens=host_free_tokens,
        page_size=scheduler.page_size,
        step_tokens=_step_tokens_within(scheduler, running_batch, room),
        pass_tokens=pass_tokens(scheduler, running_batch),
        server=server,
        can_swap=preemption is not None,
        may_preempt=preemption is not None and preemption.config.enabled,
        kv=ServerKv(scheduler, jobs.req_of, served, in_host),
    )


def fits_adapters(scheduler: Scheduler, names: Collection[str]) -> bool:
    """See Kv. SGLang is not asked if it drains adapters for waiting requests itself
    (--lora-drain-wait-threshold), because it does so by each rank's own clock."""
    if not scheduler.enable_lora or scheduler.lora_drainer is not None:
        return True
    manager = scheduler.tp_worker.model_runner.lora_manager
    return bool(manager.validate_lora_batch({name or None for name in names}))


def num_arrivals(scheduler: Scheduler) -> int:
    """Return the number of requests that have arrived, except requests that no plan sees at present
    (unseen)."""
    num_arrived: int = scheduler.sage.core.num_arrivals
    return num_arrived - len(unseen(scheduler))


def free_slots(scheduler: Scheduler, running_batch: Batch) -> int:
    if scheduler.sage.only_decodes:  # a request without a slot waits with its prompt's KV
        return int(scheduler.req_to_token_pool.available_size())
    num_running = len(running_batch.reqs)
    return scheduler.get_num_allocatable_reqs(num_running, running_batch=running_batch)


def is_full(scheduler: Scheduler, running_batch: Batch) -> bool:
    """Whether SGLang will admit nothing because of batch_is_full."""
    return running_batch.batch_is_full and not is_lifted(scheduler, running_batch)


def is_lifted(scheduler: Scheduler, running_batch: Batch) -> bool:
    """Whether SGLang resets batch_is_full before every pass: if the batch is empty, or attention is
    hybrid."""
    return running_batch.is_empty() or scheduler.is_hybrid_swa


def is_short(scheduler: Scheduler, running_batch: Batch) -> bool:
    """Whether memory runs out at the next decode step."""
    most = _most_step_tokens(scheduler, running_batch)
    # Before most steps the evictable tokens suffice, and counting the free ones takes longer.
    if most <= scheduler.tree_cache.evictable_size():
        return False
    room = room_tokens(scheduler)
    return most > room and step_tokens(scheduler, running_batch) > room


def _step_tokens_within(scheduler: Scheduler, running_batch: Batch, room: int) -> int:
    """Return step_tokens, or a page for each request if there is room for that, which saves two
    walks through the batch."""
    most = _most_step_tokens(scheduler, running_batch)
    return int(most) if most <= room else step_tokens(scheduler, running_batch)


def _most_step_tokens(scheduler: Scheduler, running_batch: Batch) -> float:
    """Return the most that step_tokens can be; inf: unknown. Without drafts a request takes at most
    a page (beam search is refused)."""
    has_drafts = not scheduler.spec_algorithm.is_none()
    if has_drafts or scheduler.sage.only_decodes or scheduler.chunked_req is not None:
        return math.inf
    return len(running_batch.reqs) * scheduler.page_size


def room_tokens(scheduler: Scheduler) -> int:
    """Return the free and evictable tokens (see SchedulerView)."""
    free_tokens: int = scheduler.token_to_kv_pool_allocator.available_size()
    return free_tokens + scheduler.tree_cache.evictable_size()


def step_tokens(scheduler: Scheduler, running_batch: Batch) -> int:
    """Return the KV tokens that the next decode step takes, in whole pages.

    0 if SGLang would skip a step rather than retract, because the result in flight ends answers and
    returns their memory (Scheduler.update_running_batch).
    """
    if running_batch.is_empty() or scheduler._reqs_finishing_inflight(running_batch):
        return 0
    num_joining = len(scheduler.waiting_queue) if scheduler.sage.only_decodes else 0
    return running_batch.new_tokens_required_next_decode() + num_joining * scheduler.page_size


def pass_tokens(scheduler: Scheduler, running_batch: Batch) -> int:
    """Return the most prompt tokens that PrefillAdder's budgets (managers/schedule_policy.py)
    allow."""
    chunk_tokens = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
    num_mixed = len(running_batch.reqs) if scheduler.is_mixed_chunk else 0
    return min(chunk_tokens, scheduler.max_prefill_tokens) - num_mixed


class ServerKv:
    """Answers a pass's questions about KV (Kv)."""

    def __init__(
        self,
        scheduler: Scheduler,
        waiting: Mapping[Job, Req],
        served: Sequence[Req] = (),
        swapped: Collection[Job] = (),
    ) -> None:
        """served: requests that run, or are being chunked. swapped: see SchedulerView."""
        self._scheduler, self._tree_cache = scheduler, scheduler.tree_cache
        self._waiting, self._served, self._swapped = waiting, served, swapped
        self._begun: dict[Job, Req] = {}
        self._come_prefilled = scheduler.sage.only_decodes
        self._matched = set[Job]()

    def cached(self, job: Job) -> tuple[int, int]:
        """See Kv. Found as SGLang's cache-aware policies find it."""
        req = self._of(job)
        if self._come_prefilled:
            return len(req.origin_input_ids), req.host_hit_length
        self._match(job, req)
        return req.num_matched_prefix_tokens, req.host_hit_length

    def _match(self, job: Job, req: Req) -> None:
        """Match a prompt with the radix tree, once a pass."""
        if job not in self._matched:
            self._matched.add(job)
            match_kv_cache(req, self._tree_cache)

    def shared_tokens(self, job: Job) -> int:
        """See Kv. A lock on the prefix, taken and released again, shows how much it reduces the
        evictable tokens."""
        req, tree = self._of(job), self._tree_cache
        if self._come_prefilled:
            return 0
        self._match(job, req)
        before: int = tree.evictable_size()
        lock = tree.lock(req.last_node)
        taken = before - tree.evictable_size()
        tree.unlock(lock)
        shared_tokens = int(req.prefix_len) - taken
        if job not in self._swapped:
            return shared_tokens
        return min(shared_tokens, max(req.sage.shared_nodes.values(), default=0))

    def common_tokens(self, job: Job, other: Job) -> int:
        """See Kv. As in the radix tree, prompts share nothing if they differ in LoRA adapter or
        salt, or have input embeddings."""
        if self._tree_cache.disable or self._come_prefilled:
            return 0
        one, two = self._of(job), self._of(other)
        ids, other_ids = one.origin_input_ids, two.origin_input_ids
        # This is called often, and most pairs differ at this one token.
        if job.cached_tokens >= min(len(ids), len(other_ids)):
            return 0
        if ids[job.cached_tokens] != other_ids[job.cached_tokens]:
            return 0
        if (one.extra_key, one.cache_salt) != (two.extra_key, two.cache_salt):
            return 0
        if one.input_embeds is not None or two.input_embeds is not None:
            return 0
        return common_length(ids, other_ids)

    def _of(self, job: Job) -> Req:
        """Return the request of a job that waits or has begun."""
        req = self._waiting.get(job) or self._begun_of(job)
        assert req is not None
        return req

    def _begun_of(self, job: Job) -> Req | None:
        if not self._begun:
            self._begun.update((req.sage.job, req) for req in self._served)
        return self._begun.get(job)

    def holding(self, job: Job) -> Holding | None:
        preemption = self._scheduler.sage.preemption
        req = self._begun_of(job)  # on a decode server, its KV may not have come yet
        if preemption is None or req is None:
            return None
        held_by: Holding | None = preemption.holding(req)
        return held_by

    def kept_for(self) -> Mapping[str, int]:
        kept: Mapping[str, int] = self._scheduler.sage.session_kv.kept_for()
        return kept

    def fits_adapters(self, names: Collection[str]) -> bool:
        return fits_adapters(self._scheduler, names)


def common_length(one: Sequence[int], two: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    most = min(len(one), len(two))
    differs = np.not_equal(one[:most], two[:most])
    return int(differs.argmax()) if differs.any() else most
