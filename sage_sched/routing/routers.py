"""The dispatchers, by name."""

from __future__ import annotations

from sage_sched.routing.gorouting import GoRouting
from sage_sched.routing.router import (
    CacheAware,
    MinLoad,
    PowerOfTwo,
    PredictedCost,
    RoundRobin,
    Router,
    TotalRequests,
    TotalTokens,
)

OURS: tuple[type[Router], ...] = (PredictedCost, GoRouting)
STOCK: tuple[type[Router], ...] = (
    RoundRobin,
    TotalRequests,
    TotalTokens,
    PowerOfTwo,
    CacheAware,
    MinLoad,
)
_BY_NAME = {router.name: router for router in (*OURS, *STOCK)}
ROUTERS = tuple(_BY_NAME)


def router_named(name: str, seed: int = 0) -> Router:
    """The dispatcher of this name. Raises ValueError, which lists the known ones."""
    try:
        return _BY_NAME[name](seed)
    except KeyError:
        raise ValueError(f"unknown dispatcher {name!r}, known: {', '.join(ROUTERS)}") from None
