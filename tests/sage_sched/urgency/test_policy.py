"""Levels of urgency: who goes first, and how far the others are overtaken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.job import Hints
from sage_sched.urgency import Urgency, UrgencyParameters
from tests.sage_sched.crowd import ROOMY, crowd, overtakings
from tests.sage_sched.situations import decided
from tests.sage_sched.strategies import SERVER, decide, job, named, waiting

MIXED = "wait 0:100u5%150 1:100u3%950 2:100u3%150 3:100u2%950 4:100u1%950 5:100u4%150"
# More come of the most urgent level than a piece of work lets pass.
FLOOD = "wait 0:100u2%950 " + " ".join(f"{n}:100u1%150s{2000 * n}" for n in range(1, 20))


@pytest.mark.parametrize(
    ("policy", "situation", "plan"),
    [
        # The more urgent go first, and of a level the shorter, or the first to come.
        ("urgency", MIXED, "+4 +3 +2 +1 +5 +0"),
        ("urgency-arrival", MIXED, "+4 +3 +1 +2 +5 +0"),
        # A piece of work, as large as the pool, is worth a level.
        ("urgency", "wait 0:100u4%950 1:100u2%150s19999", "+1 +0"),
        ("urgency", "wait 0:100u4%950 1:100u2%150s30000", "+0 +1"),
        ("urgency", f"{FLOOD}; slots 0",
         "1 2 3 4 5 6 7 8 9 0 10 11 12 13 14 15 16 17 18 19; open 20"),
        # Jobs yield to more urgent ones alone, the least urgent first, and no more than it takes.
        ("urgency", "run 0:100u3%950+1=1100; wait 1:100u2%150; full", "-0 +1"),
        ("urgency", "run 0:100u3%950+1=1100; wait 1:100u3%150; full", "1"),
        ("urgency", "run 0:100u2%950+1=1100; wait 1:100u1%150; full", "-0 +1"),
        ("urgency", "run 0:100u2%950+1=1100; wait 1:100u4%150; full", "1"),
        ("urgency", "run 0:100u3%950+1 1:100u5%950+1 2:100u4%950+1; wait 3:100u2%150; full",
         "-1 -2 +3"),
        # It does not for one that has only waited for longer, or if its move takes longer than it.
        ("urgency", "run 0:100u3%950+1s50000=1100; wait 1:100u3%150; full", "1"),
        ("urgency", "run 0:100u3%2+1=1100; wait 1:100u2%150; full; move 1000000", "1"),
    ],
)  # fmt: skip
def test_the_more_urgent_go_first(policy: str, situation: str, plan: str) -> None:
    assert decided(situation, policy) == plan


@pytest.mark.parametrize(
    ("situation", "plan"),
    [
        ("run 0:100u2%150+5; wait 1:100u4%150", "1; decode-only"),
        ("run 0:100u2%150+5; wait 1:100u2%150", "+1"),
        ("run 0:100u3%150+5; wait 1:100u5%150", "+1"),
        ("run 0:100u2%150+5; wait 1:100u1%150", "+1"),
        ("run 0:100u2%150+5; wait 1:100u1%150 2:100u4%150", "+1 +2"),
        ("run 0:100u2%150+5; wait 1:100u1%150 2:100u4%150; fits 2", "2; decode-only"),
    ],
)
def test_prefills_wait_for_more_urgent_running_jobs(situation: str, plan: str) -> None:
    assert decided(situation, "urgency", decode_share=1.0) == plan


def test_prefills_of_the_less_urgent_leave_decode_steps_their_share() -> None:
    runs = job(0, 100, lengths=(150,), age=5, hints=Hints(urgency=2))
    later = job(1, 100, lengths=(150,), hints=Hints(urgency=4))
    policy = named("urgency", runs, later, decode_share=0.75)
    view, served, passes = replace(waiting(later), running=[runs]), 0, []
    for _ in range(40):
        passes.append(decide(replace(view, served_tokens=served), policy).decode_only)
        served += 1 if passes[-1] else 400
    decode_s = (passes.index(False, 1) - 1) * SERVER.step_time.decode_s(1, 105)
    prefill_s = SERVER.step_time.prefill_s(1, 400, 0)
    assert not passes[0]
    assert 0.75 <= decode_s / (decode_s + prefill_s) < 0.85


@pytest.mark.parametrize("urgencies", [(1, 2, 3, 4, 5), (1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5)])
def test_no_request_is_overtaken_by_more_than_the_bound(urgencies: tuple[int, ...]) -> None:
    piece_tokens, num_overtaken = 200, 0
    parameters = UrgencyParameters(level_pools=piece_tokens / ROOMY.kv_pool_tokens)
    for seed in range(20):
        policy = Urgency(parameters, ROOMY.server_facts())
        for admitted, waits in overtakings(policy, crowd(seed, urgencies=urgencies)):
            later = admitted.served_at_arrival_tokens - waits.served_at_arrival_tokens
            assert later <= waits.hints.urgency * piece_tokens
            num_overtaken += later > 0
    assert num_overtaken > 500
