"""Best-effort prefills that pause between layers for urgent requests (policy qllm, experimental).

SGLang can compute a prefill some layers at a time (ForwardMode.SPLIT_PREFILL, for --enable-pdmux);
the state between two slices stays in `batch.split_forward_batch`. Here the scheduler uses this
without pdmux: between two slices it takes in requests, serves the latency-sensitive, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.utils import is_health_check_generate_req
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from patches.compat import UnsupportedServerError, drop_ended
from patches.engine_types import Batch, Req, Scheduler
from sage_sched.best_effort import Qllm, layers_per_slice, those_who_pass
from sage_sched.policy import Policy


def slices_of(scheduler: Scheduler, policy: Policy) -> Slices | None:
    """For a scheduler that starts under this policy; None if its prefills stay whole. Raises
    UnsupportedServerError if the model's prefills cannot be cut."""
    if not _is_asked_for(policy):
        return None
    model = scheduler.tp_worker.model_runner.model
    _attach(model)
    if not hasattr(model, "forward_split_prefill"):
        raise UnsupportedServerError(
            f"policy.qllm.slice_ms does not work with {type(model).__name__}: SGLang cannot "
            "compute some of its layers at a time. Set it to 0."
        )
    return Slices(scheduler)


def why_not_cut(policy: Policy, slices: Slices | None) -> str:
    """Why a running server cannot go by this policy's slices; "" if it can."""
    if _is_asked_for(policy) and slices is None:
        return "the server was started without slices, and may not be able to cut prefills"
    return ""


def _is_asked_for(policy: Policy) -> bool:
    return isinstance(policy, Qllm) and policy.slice_s > 0


def _attach(model: Any) -> None:
    """Give Mixtral the method for some layers at a time, which SGLang has for Llama only. The two
    models (models/mixtral.py, llama.py) differ only within a layer."""
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.models.mixtral import MixtralForCausalLM

    if isinstance(model, MixtralForCausalLM) and not hasattr(model, "forward_split_prefill"):
        MixtralForCausalLM.forward_split_prefill = LlamaForCausalLM.forward_split_prefill
        model.model.config = model.config  # where Llama's method looks for the number of layers


def settle(scheduler: Scheduler, result: object) -> None:
    """Wait until the device has computed a slice. Slices are launched asynchronously: without this
    all layers would be queued before anybody could pass."""
    if scheduler.device != "cpu":
        scheduler.device_module.current_stream().synchronize()


class Slices:
    """The cut prefills of one scheduler.

    parked: the requests of the prefill that is between two slices. They are in no batch that
        SGLang sees, but will need memory for their answers.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_layers: int = scheduler.model_config.num_hidden_layers
        self.parked: list[Req] = []
        self._num_prefills = 0
        self._num_cuts = 0
        self._num_passed = 0

    def stats(self) -> dict[str, int]:
        """Counters for /server_info: prefills that were cut, cuts, and requests that passed."""
        return {
            "num_prefills": self._num_prefills,
            "num_cuts": self._num_cuts,
            "num_passed": self._num_passed,
        }

    def layers_of(self, batch: Batch) -> int:
        """Layers per slice of a batch; 0 if it is computed whole."""
        state = self._scheduler.sage
        policy = state.policy
        if batch.forward_mode != ForwardMode.EXTEND or not _is_asked_for(policy):
            return 0
        assert isinstance(policy, Qllm)
        if not policy.gives_way(req.sage.job for req in batch.reqs) or not _can_be_cut(batch):
            return 0
        layers = layers_per_slice(
            state.server.step_time,
            batch.prefix_lens,
            batch.extend_lens,
            self._num_layers,
            policy.slice_s,
        )
        return layers if layers < self._num_layers else 0

    def run(
        self, batch: Batch, layers: int, launch: Callable[[Batch], Any], cut: Callable[[], None]
    ) -> Any:
        """Scheduler.run_batch of a prefill, some layers at a time. cut: called at each cut."""
        scheduler = self._scheduler
        backend = scheduler.tp_worker.model_runner.attn_backend
        self._num_prefills += 1
        self.parked = batch.reqs
        result: Any = None
        for first in range(0, self._num_layers, layers):
            if first:
                settle(scheduler, result)
                cut()
                self._num_cuts += 1
                self._give_way()
                # Others have run: attention's metadata is theirs, and SGLang must not look for this
                # batch's input, nor count its tokens again.
                backend.init_forward_metadata(batch.split_forward_batch)
                batch.input_ids = batch.split_forward_batch.input_ids
                scheduler.processed_tokens_counter -= batch.extend_num_tokens
            batch.forward_mode = ForwardMode.SPLIT_PREFILL
            batch.split_index = first
            batch.split_forward_count = min(layers, self._num_layers - first)
            scheduler.enable_pdmux = True  # tells SGLang's run_batch of slices
            try:
                result = launch(batch)
            finally:
                scheduler.enable_pdmux = False
                batch.forward_mode = ForwardMode.EXTEND
        batch.split_index, batch.split_forward_batch = 0, None
        self.parked = []
        return result

    def _give_way(self) -> None:
        """Receive requests and prefill those that pass. If any running request would pass too, all
        running requests get a token."""
        scheduler, policy = self._scheduler, self._scheduler.sage.policy
        assert isinstance(policy, Qllm)
        self._receive()
        while (batch := self._admitted()) is not None:
            self._num_passed += len(batch.reqs)
            self._run(batch)
            self._join(batch)
        running = scheduler.running_batch
        drop_ended(running)
        # Without enough memory SGLang would retract requests, and it cannot retract the parked.
        if any(policy.passes(req.sage.job) for req in running.reqs) and running.check_decode_mem():
            decoding = scheduler.update_running_batch(running)
            if decoding is not None and not decoding.is_empty():
                self._run(decoding)

    def _run(self, batch: Batch) -> None:
        scheduler = self._scheduler
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))

    def _join(self, batch: Batch) -> None:
        """The unfinished requests of a prefill go on to decode."""
        scheduler = self._scheduler
        batch.filter_batch()
        if batch.is_empty():
            return
        if scheduler.running_batch.is_empty():
            scheduler.running_batch = batch
        else:
            scheduler.running_batch.merge_batch(batch)

    def _receive(self) -> None:
        """Take in new requests. Other messages wait for the end of the prefill."""
        scheduler = self._scheduler
        inbox = scheduler._deferred_input_requests
        inbox.extend(scheduler.request_receiver.recv_requests(local_reqs=[]))
        taken = _new_requests(inbox)
        inbox[:] = [message for message in inbox if not any(message is one for one in taken)]
        for message in taken:
            scheduler._request_dispatcher(message)

    def _admitted(self) -> Batch | None:
        """A prefill of those that pass, if SGLang finds memory and slots for them."""
        scheduler, state = self._scheduler, self._scheduler.sage
        policy, running = state.policy, scheduler.running_batch
        assert isinstance(policy, Qllm)
        if not any(policy.passes(req.sage.job) for req in scheduler.waiting_queue):
            return None
        view = state.view(running)
        num_free = scheduler.max_running_requests - len(running.reqs) - len(self.parked)
        positions = those_who_pass([req.sage.job for req in self.parked], policy, view)
        positions = positions[: max(0, min(num_free, view.free_slots))]
        passing = [scheduler.waiting_queue[position] for position in positions]
        if not passing:
            return None
        with _alone(scheduler, passing):
            plan = scheduler.get_new_batch_prefill(running)
        scheduler.running_batch = plan.running_batch
        batch: Batch | None = plan.batch_to_run
        return batch


@contextmanager
def _alone(scheduler: Scheduler, passing: list[Req]) -> Iterator[None]:
    """Within this, only these requests wait, and nobody yields to them. The mark of a full batch
    is lifted, and put back afterwards."""
    state, running = scheduler.sage, scheduler.running_batch
    hidden = [req for req in scheduler.waiting_queue if req not in passing]
    preemption, was_full = state.preemption, running.batch_is_full
    scheduler.waiting_queue, state.preemption, running.batch_is_full = passing, None, False
    try:
        yield
    finally:
        scheduler.waiting_queue = [*scheduler.waiting_queue, *hidden]
        state.preemption, running.batch_is_full = preemption, was_full


def _new_requests(inbox: Iterable[Any]) -> list[Any]:
    """The new requests that can be taken in at once: those ahead of any message that concerns all
    (a pause, a flush, weights). They overtake health checks and aborts of single requests."""
    found = []
    for message in inbox:
        if isinstance(message, TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput):
            if not is_health_check_generate_req(message) and not _needs_more(message):
                found.append(message)
        elif not isinstance(message, AbortReq) or message.abort_all:
            break
    return found


def _needs_more(message: Any) -> bool:
    """Whether SGLang does more with it than dispatch (Scheduler.process_input_requests)."""
    each = message if isinstance(message, BatchTokenizedGenerateReqInput) else (message,)
    return any(
        one.mm_inputs is not None or one.positional_embed_overrides is not None for one in each
    )


def _can_be_cut(batch: Batch) -> bool:
    """Whether SGLang's slices do everything for these requests that a whole prefill does
    (TpModelWorker.forward_batch_split_prefill)."""
    if batch.is_prefill_only or batch.return_hidden_states:
        return False
    return not any(
        req.input_embeds is not None
        or req.multimodal_inputs is not None
        or req.beam_group is not None
        or req.return_routed_experts
        or req.return_indexer_topk
        for req in batch.reqs
    )
