"""What an answer of a given length costs the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sage_sched.steps.time import ServerFacts, attended_pairs


class Cost(Protocol):
    """What a request has cost by its output_tokens-th token; strictly increasing in them."""

    def __call__(self, input_tokens: Any, output_tokens: Any, cached_tokens: Any = 0) -> Any:
        """output_tokens: at least 1. cached_tokens: of the input, what needs no prefill. All may be
        arrays."""


def _resource_bound(server: ServerFacts) -> Cost:
    """KV tokens held, summed over decode steps; attention work grows alike (SageSched, eq. 2)."""
    return lambda input_tokens, output_tokens, cached_tokens=0: (
        output_tokens * output_tokens / 2 + input_tokens * output_tokens
    )


def _output(server: ServerFacts) -> Cost:
    """Decode steps (the cost of SSJF, LTR and TRAIL; SageSched, Fig. 10)."""
    return lambda input_tokens, output_tokens, cached_tokens=0: output_tokens * 1.0


def _overall(server: ServerFacts) -> Cost:
    """Tokens, an output token priced as two of input (SageSched, Fig. 10)."""
    return lambda input_tokens, output_tokens, cached_tokens=0: (
        input_tokens - cached_tokens + 2.0 * output_tokens
    )


def _measured(server: ServerFacts) -> Cost:
    """Seconds of this server: the prefill of what is not cached, and a part in every decode step.

    Of a decode step a request takes the time that it adds, for itself and for each KV token that it
    holds, and a share of the fixed time: its share of the pool and its share of the slots, as
    either may be what keeps others out. To charge only what does gains nothing: against both, mean
    TTLT under sage is 0.998 by the pool alone where it is full, 1.006 by the slots alone where
    those are, 1.006 by neither where the server prefills most of the time (bench.paper.cases'
    REGIMES, 600 requests, 4 seeds); and to be wrong about it costs up to a fifth.
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


_COSTS: dict[str, Callable[[ServerFacts], Cost]] = {
    "resource-bound": _resource_bound,
    "output": _output,
    "overall": _overall,
    "measured": _measured,
}
COSTS = tuple(_COSTS)


def cost_named(name: str, server: ServerFacts) -> Cost:
    """The cost model of this name. Raises ValueError, which lists the known ones."""
    try:
        return _COSTS[name](server)
    except KeyError:
        raise ValueError(f"unknown cost model {name!r}, known: {', '.join(COSTS)}") from None
