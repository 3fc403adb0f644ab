"""Two classes: who goes first, and how far best effort is overtaken."""

from __future__ import annotations

import pytest

from sage_sched.best_effort import Qllm, QllmParameters
from tests.sage_sched.crowd import ROOMY, crowd, overtakings
from tests.sage_sched.situations import decided


@pytest.mark.parametrize(
    ("situation", "plan"),
    [
        # The sensitive go first, and each class goes by arrival.
        ("wait 0:100u5%150 1:100u3%950 2:100u3%150 3:100u2%950 4:100u1%150 5:100u2%150",
         "+3 +4 +5 +0 1 2; open 2; prefill 301"),
        ("wait 0:100%150 2:100%150", "+0 +2"),
        # Best effort is overtaken by jobs that come within a pool of work.
        ("wait 0:100s10%150 1:100u1%150s10009", "+1 +0; prefill 101"),
        ("wait 0:100s10%150 1:100u1%150s10011", "+0 +1"),
        # It yields to sensitive jobs.
        ("run 0:100u3%950+1=1100; wait 1:100u2%150; full", "-0 +1; prefill 101"),
        ("run 0:100u3%950+1=1100; wait 1:100u1%150; full", "-0 +1; prefill 101"),
        ("run 0:100u5%950+1=1100; wait 1:100u3%150; full", "1"),
        ("run 0:100u2%950+1=1100; wait 1:100u1%150; full", "1; prefill 101"),
        # The sensitive are prefilled by themselves: uncached tokens in pages, and one to spare.
        ("wait 0:100%150 1:100u2%150 2:100%150 3:100u1%150; page 16; cached 3 40",
         "+1 +3 +0 2; open 1; prefill 192"),
        ("wait 0:100%150 1:100u2%150~+5", "^1 +0"),
        ("run 3:100u1%150; wait 0:100%150 1:100u2%150 2:100%150; fits 0 2", "+0 +2"),
        # Beside them a best-effort chunk shrinks to a page.
        ("chunk 0:3000/512%150; wait 1:100u2%150; page 16; noswap",
         "1; open 1; chunk 16; prefill 128"),
    ],
)  # fmt: skip
def test_the_sensitive_go_first(situation: str, plan: str) -> None:
    assert decided(situation, "qllm") == plan


def test_best_effort_is_overtaken_by_no_more_than_the_bound() -> None:
    piece_tokens, num_overtaken = 200, 0
    for seed in range(20):
        parameters = QllmParameters(level_pools=piece_tokens / ROOMY.kv_pool_tokens)
        policy = Qllm(parameters, ROOMY.server_facts())
        for admitted, waits in overtakings(policy, crowd(seed, urgencies=(1, 2, 3, 4, 5))):
            if not policy.passes(waits):
                later = admitted.served_at_arrival_tokens - waits.served_at_arrival_tokens
                assert later <= piece_tokens
                num_overtaken += later > 0
    assert num_overtaken > 100
