"""Replaces a scheduler's device: its time, and its model.

Time advances only with steps, moves of KV, and turns of the scheduler's loop, so nothing depends on
the host. The model's next token follows from the KV of all tokens before it: if a swap, a prefix or
a retraction mixes KV up, the answer changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult

from bench.engines.clock.device_clock import DeviceModel
from bench.engines.server.model import END_TOKEN, NUM_SPECIAL_TOKENS, SPECIAL_TOKENS
from bench.simulator.presets import H800_QWEN3_32B
from bench.workloads.forced_length import LENGTH_KEY, num_output_tokens
from tests.patches.recorded.asks import NUM_WORDS

_END = SPECIAL_TOKENS.index(END_TOKEN)
_START_S = 1_000.0
_EPOCH_S = 1_800_000_000.0
# Its step times, as a share of the shipped ones. It slows down, so there is always more to learn.
_FACTOR, _SLOWER_EVERY_S = 0.6, 2.0
# A prime below 2^23: all sums of KV are exact.
_MODULUS = 8191


class Clock:
    """The time of this process."""

    def __init__(self) -> None:
        self.now_s = _START_S

    def passes(self, seconds: float) -> None:
        self.now_s += seconds

    def install(self) -> None:
        """Make `time` return this clock's time."""
        for name in ("monotonic", "perf_counter", "thread_time", "process_time"):
            setattr(time, name, lambda: self.now_s)
            setattr(time, f"{name}_ns", lambda: int(self.now_s * 1e9))
        time.time = lambda: _EPOCH_S + self.now_s
        time.time_ns = lambda: int((_EPOCH_S + self.now_s) * 1e9)


class Device:
    """A modelled GPU, whose model computes only if its hidden states are read."""

    def __init__(self, clock: Clock, moves_a_failure: int | None) -> None:
        """moves_a_failure: one of this many moves of KV to host memory or back, and evictions for
        its sake, fails; None if all succeed."""
        self._clock, self._moves_a_failure = clock, moves_a_failure
        facts = H800_QWEN3_32B.server_facts()
        # Faster than the shipped step times.
        self._model = DeviceModel(facts.step_time, facts.swap_token_s).times(_FACTOR)
        self._compute = TpModelWorker.forward_batch_generation
        self._num_moves = self._num_launches = 0

    def launch(self, worker: Any, batch: Any) -> GenerationBatchResult:
        """Replace TpModelWorker.forward_batch_generation."""
        pool = worker.model_runner.token_to_kv_pool.k_buffer[0]
        rows = worker.model_runner.req_to_token_pool.req_to_token
        positions = _positions(batch)
        self._num_launches += 1
        # KV that is computed twice differs, as the last bits do on a GPU.
        kv = batch.input_ids * (positions + 1) * self._num_launches % _MODULUS
        pool[batch.out_cache_loc, 0, 0] = kv.to(pool)
        ends = zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
        sums = [int(pool[rows[row, :end], 0, 0].double().sum()) for row, end in ends]
        seen = zip(batch.reqs, sums, _penalties(batch), strict=True)
        said = [_next_token(req, kv + penalty) for req, kv, penalty in seen]
        result = GenerationBatchResult(LogitsProcessorOutput(None))
        if worker.model_runner.sampling_observer is not None:
            result = self._compute(worker, batch)
        result.next_token_ids = torch.tensor(said)
        slows_down = 1 + max(0.0, self._clock.now_s - _START_S) // _SLOWER_EVERY_S / 2
        result.device_s = self._model.step_s(batch) * slows_down
        return result

    def wait(self, result: Any) -> None:
        """Wait until the device is done with a step."""
        self._clock.passes(getattr(result, "device_s", 0.0))

    def fails(self) -> bool:
        """Count a move of KV, and return whether it fails."""
        self._num_moves += 1
        return self._moves_a_failure is not None and self._num_moves % self._moves_a_failure == 0

    def moving(self, copy: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        """Return a copy of KV to host memory, or back, that takes its time. size: returns the
        tokens, from its arguments."""

        def timed(pool: Any, *given: Any, **kw: Any) -> Any:
            if self.fails():
                raise RuntimeError("no memory")
            self._clock.passes(size(*given) * self._model.swap_token_s)
            return copy(pool, *given, **kw)

        return timed


def _positions(batch: Any) -> torch.Tensor:
    """Return the position of each token that a batch computes."""
    if not batch.forward_mode.is_extend():
        return batch.seq_lens - 1
    extents = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    return torch.cat([torch.arange(cached, cached + new) for cached, new in extents])


def _penalties(batch: Any) -> list[int]:
    """Return a number for what each request's sampling does to logits."""
    logits = torch.ones(len(batch.reqs), NUM_SPECIAL_TOKENS + NUM_WORDS)
    batch.sampling_info.apply_logits_bias(logits)
    # Rounded before they are summed: processors sum floats in different orders. A repetition
    # penalty is left out, because SGLang compiles it for the processor.
    found: list[int] = (64 * logits.nan_to_num(neginf=-8.0)).round().int().sum(dim=1).tolist()
    return found


def _next_token(req: Any, seen: int) -> int:
    """Return a word, or the end token if the answer has the length that its request asks for."""
    if num_output_tokens(req) >= req.sampling_params.custom_params[LENGTH_KEY]:
        return _END
    return NUM_SPECIAL_TOKENS + seen % NUM_WORDS
