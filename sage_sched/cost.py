"""What an answer of a given length costs the server."""

from __future__ import annotations

from collections.abc import Callable

from sage_sched.config import COSTS

# (input tokens, output tokens generated so far) -> cost; strictly increasing in the output.
Cost = Callable[[int, int], float]


def _resource_bound(input_tokens: int, output_tokens: int) -> float:
    """KV tokens held, summed over decode steps; attention work grows alike (SageSched, eq. 2)."""
    return output_tokens * output_tokens / 2 + input_tokens * output_tokens


def _output(input_tokens: int, output_tokens: int) -> float:
    """Decode steps (the cost of SSJF, LTR and TRAIL; SageSched, Fig. 10)."""
    return float(output_tokens)


def _overall(input_tokens: int, output_tokens: int) -> float:
    """Tokens, an output token priced as two of input (SageSched, Fig. 10)."""
    return float(input_tokens + 2 * output_tokens)


_COSTS: dict[str, Cost] = dict(zip(COSTS, (_resource_bound, _output, _overall), strict=True))


def cost_named(name: str) -> Cost:
    """The cost model of this name. Raises ValueError, which lists the known ones."""
    try:
        return _COSTS[name]
    except KeyError:
        raise ValueError(f"unknown cost model {name!r}, known: {', '.join(COSTS)}") from None
