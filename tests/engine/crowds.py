"""Many requests to a server that has the stage. The order of arrival is scripted, and tokens decide
the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.engines.server.server import Server
from tests.checks.exactness import Spoken, ask
from tests.engine import stage
from tests.engine.serving import (
    SHORT_PROMPT,
    UNASKED_LONG_PROMPT,
    UNASKED_SHORT_PROMPT,
    SageServer,
    generate,
)

Asked = tuple[str, int]  # a prompt, and the number of tokens to answer with
# Requests of one cap. A server has to predict which gets the shorter answer.
LONG_AND_SHORT = {
    "long": {"prompt": UNASKED_LONG_PROMPT, "max_new_tokens": 20},
    "short": {"prompt": UNASKED_SHORT_PROMPT, "max_new_tokens": 20},
}


def ask_one(server: Server, asked: Asked, **sampling: Any) -> Spoken:
    return ask(server, [asked], 1, sampling=[sampling])[0]


def started(server: SageServer, asked: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the ids of requests in the order of their starts. All come before the first may start.
    asked: fields of their bodies, by id."""
    ask = partial(generate, server)
    calls = [partial(ask, rid=rid, **{"prompt": SHORT_PROMPT, **asked[rid]}) for rid in asked]
    stage.together(server, calls)
    assert server.stats()["num_policy_errors"] == 0
    order: list[str] = stage.state(server)["started"]
    return order


def ask_together(
    server: Server,
    asked: Sequence[Asked],
    sampling: Sequence[Mapping[str, Any]] = ({},),
    then: Callable[[dict[str, Any]], None] | None = None,
    **until: int,
) -> list[Spoken]:
    """Return the answers to requests that all arrive before the first may start. sampling: further
    parameters, in turn. For the rest see stage.together()."""
    calls = [
        partial(ask_one, server, one, **sampling[i % len(sampling)]) for i, one in enumerate(asked)
    ]
    return stage.together(server, calls, then, **until)
