"""What an answer of a given length costs the server."""

from __future__ import annotations

from typing import Any, Protocol

from sage_sched.steps import ServerFacts, attended_pairs


class Cost(Protocol):
    """What a request has cost by its output_tokens-th token; strictly increasing in them."""

    def __call__(self, input_tokens: Any, output_tokens: Any, cached_tokens: Any = 0) -> Any:
        """output_tokens: at least 1. cached_tokens: of the input, which need no prefill. All may be
        arrays."""


def num_steps(input_tokens: Any, output_tokens: Any, cached_tokens: Any = 0) -> Any:
    """Decode steps: one a token (the cost of SSJF, LTR and TRAIL; SageSched, Fig. 10)."""
    return output_tokens * 1.0


def seconds_on(server: ServerFacts) -> Cost:
    """Seconds of this server: the prefill of what is not cached, and a share of each decode step.

    A request is charged for the time that it adds to a decode step, for itself and for each KV
    token that it holds. It is also charged a share of the step's fixed time, for its share of the
    pool and for its share of the slots, as either may keep others out. Charging only what is scarce
    gains nothing: relative to both, mean TTLT under sage is 0.998 by the pool alone if that is
    full, 1.006 by the slots alone if those are, and 1.006 by neither if the server mostly prefills
    (600 requests, 4 seeds). Being wrong about what is scarce costs up to a fifth.
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
