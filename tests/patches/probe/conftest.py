from __future__ import annotations

import pytest

from patches.failures import Failures
from patches.probe.scores import Probing
from sage_sched.app.registry import policy_named
from tests.patches.schedulers import Server, make_request
from tests.predictor_store.probes import probe
from tests.sage_sched.strategies import SERVER


class Rank:
    """The probe of one rank of a server under trail, on which one request runs."""

    def __init__(self) -> None:
        server = Server()
        self.policy = server.state.jobs._policy = policy_named("trail", {}, SERVER)
        self.failures = Failures()
        self.probing = Probing(self.policy, probe(), None, self.failures)
        server.state.listeners.append(self.probing)
        (self.req,) = server.arrive(make_request([20, 400] * 50))
        self.job = self.req.sage.job


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def other_rank() -> Rank:
    return Rank()
