"""Models the time of a server's step, the facts about a server, and the cost of an answer by its
length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A function that returns the cost of a request up to a token of its answer, and that is strictly
# increasing. It is called with input_tokens, output_tokens (at least 1) and cached_tokens (0 if
# left out), the part of the input that needs no prefill. All may be arrays.
Cost = Callable[..., Any]

# Cutting a prefill in two costs a decode step and the fixed time of a prefill. If first tokens
# count as much as later ones, cuts may take a sixth of the time. (Simulated, for cuts that cost 1 s
# and a bound of 1 s: the mean TTFT is 3.3 s with a sixth, 3.7 s with a fourth, 5.4 s with a half,
# and 3.2 s without a bound.)
FEW_CUTS = 6
# Cuts may take half of the time if the operator has set a short bound. They may also do so to keep
# a TPOT target if steps are mixed, because a cut costs less then.
MANY_CUTS = 2


@dataclass(frozen=True, slots=True)
class StepTime:
    """A linear model of a step's seconds. Each coefficient is at least 0.

    A prefill step of n requests that computes t tokens, which attend to p (query, key) pairs:
        prefill_base_s + n * prefill_request_s + t * prefill_token_s + p * prefill_pair_s
    A decode step of n requests whose KV holds k tokens gives each of them one token. A step of
    speculative decoding that gives each of them m tokens counts as m such steps:
        decode_base_s + n * decode_request_s + k * decode_kv_token_s
    """

    prefill_base_s: float
    prefill_request_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_base_s: float
    decode_request_s: float
    decode_kv_token_s: float

    def prefill_s(self, num_requests: int, num_tokens: int, num_pairs: float) -> float:
        return (
            self.prefill_base_s
            + num_requests * self.prefill_request_s
            + num_tokens * self.prefill_token_s
            + num_pairs * self.prefill_pair_s
        )

    def prompt_s(self, num_cached: Any, num_new: Any) -> Any:
        """Return the seconds that a prompt's new tokens add to a prefill step. Both may be
        arrays."""
        pairs_s = attended_pairs(num_cached, num_new) * self.prefill_pair_s
        return self.prefill_request_s + num_new * self.prefill_token_s + pairs_s

    def tokens_within(self, seconds: float, num_done: int) -> float:
        """Return how many tokens a prefill step computes in this time, 0 or more.

        num_done: tokens of the same prompt that are prefilled already.
        """
        left_s = seconds - self.prefill_s(1, 0, 0.0)
        if left_s <= 0:
            return 0.0
        # The pairs are n (num_done + n / 2).
        linear_s = self.prefill_token_s + self.prefill_pair_s * num_done
        root_s = math.sqrt(linear_s**2 + 2 * self.prefill_pair_s * left_s)
        return 2 * left_s / (linear_s + root_s) if root_s else math.inf

    def longest_start_s(self, ttft_s: float) -> float:
        """Return the longest prefill, in seconds, of a job that starts ahead of its order for a
        TTFT target (0: no job starts). A longer one delays all running jobs for one first token,
        and gains little from sharing a step.

        Where one request in six has a whole document, starting documents ahead made the mean 5 to
        10 % longer, and a tenth of all tokens late (experiment `systems`). By the target alone,
        ordinary prompts of a large model would be too long for a target of 500 ms.
        """
        return max(0.1 * ttft_s, 5.0 * self.prefill_base_s) if ttft_s else 0.0

    def decode_s(self, num_requests: int, kv_tokens: int) -> float:
        return (
            self.decode_base_s
            + num_requests * self.decode_request_s
            + kv_tokens * self.decode_kv_token_s
        )

    def mixed_s(
        self, num_prefills: int, num_tokens: int, num_pairs: float, num_decodes: int, kv_tokens: int
    ) -> float:
        """Return the seconds of one step that prefills and decodes. It reads the weights once, so
        the smaller of the two base times is left out."""
        prefill_s = self.prefill_s(num_prefills, num_tokens, num_pairs)
        if not num_decodes:
            return prefill_s
        decode_s = self.decode_s(num_decodes, kv_tokens)
        return prefill_s + decode_s - min(self.prefill_base_s, self.decode_base_s)


def attended_pairs(num_cached: Any, num_new: Any) -> Any:
    """Return the (query, key) pairs of num_new tokens that are computed after num_cached."""
    return num_new * (num_cached + num_new / 2)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts about its server that a policy may use. They are the same on every rank.

    kv_pool_tokens: how many tokens its KV pool holds.
    max_running_requests: its slots.
    swap_token_s: the latest estimate of the seconds to move one token's KV to host memory, or back.
    mixes_steps: whether a step prefills and decodes together (SGLang's --enable-mixed-chunk).
    reserve_tokens: KV that a step sets aside for each request (speculative decoding: for drafts).
    level_gap: a running job is preempted for a waiting one whose level is smaller by more than
        this.
    forgets: whether evicted KV is lost (SGLang's hierarchical cache keeps it).
    """

    kv_pool_tokens: int
    max_running_requests: int
    step_time: StepTime
    swap_token_s: float
    mixes_steps: bool = False
    reserve_tokens: int = 1
    level_gap: float = math.inf
    forgets: bool = True

    def decode_beside_s(self, num_requests: int, kv_tokens: int) -> float:
        """Return the seconds that a decode step adds to a prefill. If steps are mixed, both read
        the weights at once."""
        step_time, shared_s = self.step_time, 0.0
        if self.mixes_steps:
            shared_s = min(step_time.prefill_base_s, step_time.decode_base_s)
        return step_time.decode_s(num_requests, kv_tokens) - shared_s

    def swap_s(self, kv_tokens: int) -> float:
        """Return the seconds to move a request's KV to host memory and back."""
        return 2 * kv_tokens * self.swap_token_s

    def recall_tokens(self, host_tokens: int) -> int:
        """Return the number of tokens whose prefill takes as long as loading these from host
        memory."""
        per_token_s = self.step_time.prefill_token_s
        share = self.swap_token_s / per_token_s if per_token_s > self.swap_token_s else 1.0
        return math.ceil(host_tokens * share)

    def recompute_s(self, kv_tokens: int, cached_tokens: int = 0) -> float:
        """Return the seconds to compute this KV in one prefill, if the first cached_tokens are
        cached."""
        num_new = kv_tokens - cached_tokens
        return self.step_time.prefill_s(1, num_new, attended_pairs(cached_tokens, num_new))


def num_steps(input_tokens: Any, output_tokens: Any, cached_tokens: Any = 0) -> Any:
    """Count decode steps, one a token (the cost of SSJF, LTR and TRAIL; SageSched, Fig. 10)."""
    return output_tokens * 1.0


def seconds_on(server: ServerFacts) -> Cost:
    """Return the cost in seconds of this server: the prefill of uncached tokens, and a share of
    each decode step.

    A request is charged for the time that it adds to a decode step, for itself and for each KV
    token that it holds. It is also charged a part of the step's fixed time, by its share of the
    pool and by its share of the slots, because lack of either keeps other requests out. Charging
    only the scarce resource gains nothing: mean TTLT under sage is 0.998 of that with both charges
    if only the pool is charged and full, 1.006 if only the slots are charged and full, and 1.006 if
    neither is charged and the server mostly prefills (600 requests, 4 seeds). Charging only the
    wrong resource costs up to a fifth.
    """
    step = server.step_time
    per_step_s = step.decode_request_s + step.decode_base_s / server.max_running_requests
    per_kv_token_s = step.decode_kv_token_s + step.decode_base_s / server.kv_pool_tokens
    per_request_s = step.prefill_request_s + step.prefill_base_s

    def seconds(input_tokens: Any, output_tokens: Any, cached_tokens: Any = 0) -> Any:
        new_tokens = input_tokens - cached_tokens
        prefill_s = (
            per_request_s
            + new_tokens * step.prefill_token_s
            + attended_pairs(cached_tokens, new_tokens) * step.prefill_pair_s
        )
        kv_token_steps = output_tokens * (output_tokens / 2 + input_tokens)
        return prefill_s + output_tokens * per_step_s + kv_token_steps * per_kv_token_s

    return seconds


def least_bound_s(decode_s: float, step_time: StepTime, cuts: int) -> float:
    """Return the smallest bound on the time between two tokens for which cuts leave prompts enough
    time.

    decode_s: seconds that a decode step adds to a prefill. cuts: FEW_CUTS or MANY_CUTS.
    """
    return cuts * (decode_s + step_time.prefill_s(1, 0, 0.0))
