"""What admission counts on: how much of the KV pool requests will still need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sage_sched.outlook import Outlook, set_aside_tokens


class Admission:
    """One scheduler's. SGLang asks for a waiting request's whole cap, and sets aside a share of a
    running one's that is the same for all (managers/schedule_policy.py, PrefillAdder)."""

    def __init__(self, quantile: float) -> None:
        """quantile: see PolicyConfig.admission_quantile; 0 leaves all to SGLang."""
        self._outlook = Outlook(quantile) if quantile > 0 else None

    def left_tokens(self, req: Any) -> int:
        """Of its answer, as far as can be told."""
        return int(self._to_come(req, 1.0))

    def foresee(self, reqs: Sequence[Any], new_token_ratio: float, page_size: int) -> list[float]:
        """Of each running request, how many KV tokens to keep free for the rest of its answer.

        new_token_ratio: SGLang's share of the cap, for those of which nothing is known.
        """
        left = [self._to_come(req, new_token_ratio) for req in reqs]
        if self._outlook is None:
            return left
        # What will be given back at its end, as far as can be told at a glance: what it found in
        # the radix tree at its start, others may hold too.
        held = [max(0, req.kv.kv_allocated_len - req.cached_tokens) for req in reqs]
        shares: list[float] = set_aside_tokens(
            np.array(held, np.int64), np.array(left), page_size
        ).tolist()
        return shares

    def around_add_one(
        self, original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any
    ) -> Any:
        """PrefillAdder.add_one_req, which reads what to ask for off the cap."""
        left = self._foreseen_tokens(req)
        if left is None:
            return original(adder, req, *args, **kw)
        sampling = req.sampling_params
        cap = sampling.max_new_tokens
        sampling.max_new_tokens = min(cap, len(req.output_ids) + left)
        try:
            return original(adder, req, *args, **kw)
        finally:
            sampling.max_new_tokens = cap

    def correct(self, adder: Any) -> None:
        """Replace what a new PrefillAdder has set aside for the running requests."""
        if self._outlook is None or adder.running_batch is None:
            return
        reqs = adder.running_batch.reqs
        theirs = sum(adder._get_running_request_total_token_offset(req) for req in reqs)
        ours = sum(self.foresee(reqs, adder.new_token_ratio, adder.page_size))
        adder.memory_budget.total_offset += ours - theirs

    def _foreseen_tokens(self, req: Any) -> int | None:
        job = getattr(req, "sage_job", None)
        if self._outlook is None or job is None or req.sampling_params.ignore_eos:
            return None
        job.generated_tokens = len(req.output_ids)
        return self._outlook.left_tokens(job)

    def _to_come(self, req: Any, ratio: float) -> float:
        left = self._foreseen_tokens(req)
        if left is not None:
            return float(min(left, CLIP_MAX_NEW_TOKENS))
        left = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
        # SGLang: fixed-length requests cannot benefit from the early-EOS estimate.
        share = 1.0 if req.sampling_params.ignore_eos else ratio
        return float(min(left, CLIP_MAX_NEW_TOKENS) * share)
