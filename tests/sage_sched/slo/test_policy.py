"""ProServe's decisions on cases that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.steps import StepTime
from tests.sage_sched.situations import Story
from tests.sage_sched.strategies import SERVER

# A prefilled token takes 1 ms, a step 40 ms more, and each token of KV 1 us.
STEP_TIME = StepTime(0.04, 0.0, 0.001, 0.0, 0.04, 0.0, 1e-6)
UNMIXED = replace(SERVER, step_time=STEP_TIME)
MIXED = replace(UNMIXED, mixes_steps=True)
# A first token within a second, or a minute, and ten tokens a second; high weight.
SOON, LATER = "%200d1000p100", "%200d60000p100"
HIGH = f"{SOON}w10"
EXPECTED = {"density": "expected", "starved_share": 0.0}


def server(*, mixed: bool = True, **parameters: object) -> Story:
    return Story("proserve", server=MIXED if mixed else UNMIXED, **parameters)


@pytest.mark.parametrize(
    ("situation", "parameters", "plan"),
    [
        # Three prompts take 2.6 s and are all due within 1 s: by density, and weight counts.
        (f"wait 0:900{SOON} 1:800{SOON} 2:900{HIGH}; slots 0", {}, "2 1 0"),
        (f"wait 0:900{SOON} 1:900{SOON}F2 2:900{SOON}; slots 0", {}, "1 0 2"),
        # Cached tokens take no job out of the order.
        (f"wait 0:900{SOON} 1:900{HIGH}; cached 0 200 1 200; slots 0", {}, "1 0"),
        # Requests with enough time are ordered by deadline.
        (f"wait 0:100{LATER} 1:100{LATER}a500 2:100%200d90000p100w10; now 1; slots 0", {}, "0 1 2"),
        # Best effort goes behind in the order of sage, but does not start early.
        (f"wait 0:100%2000 1:100%20 2:5000{LATER}; slots 0", {}, "2 1 0"),
        ("run 0:100%2000+100=200; wait 1:100%2500; full; now 1.9", {}, "1"),
        # Both are 1.5 s late: 25 tokens that gain 60 ms each. One can catch up.
        ("wait 0:100%10d1000p100 1:100%2000d1000p100; now 2.5; slots 0", EXPECTED, "1 0"),
        # The worth of answers counts while there is still time.
        ("wait 0:100%200d8000p100 1:100%200d9000p100w10; slots 0", {}, "0 1"),
        ("wait 0:100%200d8000p100 1:100%200d9000p100w10; slots 0", EXPECTED, "1 0"),
        # Only best effort yields, and only to urgent requests.
        (f"run 0:100%200+50=400; wait 1:300{SOON} 2:900{SOON}; full", {}, "-0 +1 2"),
        (f"run 0:100{LATER}+50=400; wait 1:300{SOON} 2:900{SOON}; full", {}, "1 2"),
        (f"run 0:100%200+50=400; wait 1:300{LATER}; full", {}, "1"),
    ],
)  # fmt: skip
def test_order_of_requests(situation: str, parameters: dict[str, object], plan: str) -> None:
    found = server(**parameters).plan(situation)
    assert found.split(";")[0] == plan


@pytest.mark.parametrize(
    ("mixed", "situation", "plan"),
    [
        # 300 ms are left, of which 40 and the KV are taken.
        (True, f"run 0:100{SOON}+10; wait 1:5000{SOON}a1700; now 1.7", "+1; prefill 259"),
        # Besides prefills each batch takes 40 ms, in which 40 of a prompt's 5000 tokens could be
        # prefilled. So a batch is longer if first tokens gain more than the tokens that become
        # late.
        (True, f"run 0:100{SOON}+10; wait 1:5000{SOON}F10a1900; now 1.9", "+1; prefill 59"),
        (True, f"run 0:100{SOON}+10; wait 1:5000{SOON}F1000a1900; now 1.9", "+1; prefill 259"),
        # On a server that does not mix, a decode step must fit too. Batches are not so short that
        # cuts take the time: a decode step and the fixed time of a prefill take 80 ms.
        (False, f"run 0:100{SOON}+10; wait 1:5000{SOON}a1500; now 1.5", "+1; prefill 419"),
        (False, f"run 0:100{SOON}+10; wait 1:5000{SOON}a1900; now 1.9", "+1; prefill 400"),
        # Tokens with the next deadline are decoded first. Without running jobs a pass need not
        # wait.
        (True, f"run 0:100{SOON}+10; wait 1:100{SOON}a1920; now 1.92", "1; decode-only"),
        (True, f"wait 0:100{SOON} 1:100{SOON}a1920; now 1.92", "+0 +1"),
        # A hopeless request shortens no batch.
        (True, "run 0:100%200d1p1+5; wait 1:5000%200d9000p100a8000; now 8", "+1"),
    ],
)
def test_a_batch_lasts_until_the_next_token_is_due(mixed: bool, situation: str, plan: str) -> None:
    """The running request needs its 11th token by 2 s."""
    eta = {"eta": 0.0} if "1.92" in situation else {}
    assert server(mixed=mixed, **eta).plan(situation) == plan


OTHERS = " ".join(f"{n}:100{HIGH}a50000" for n in range(2, 22)) + f" 22:100{SOON}a200"
# Three starved jobs, of which the first goes first, and twenty others.
BOTH = f"wait 0:100{SOON} 1:100{SOON}a100 {OTHERS}; now 50; slots 0"
SECOND = BOTH.replace(f"0:100{SOON} ", "", 1)
LARGE = BOTH.replace("0:100", "0:12000", 1)


@pytest.mark.parametrize(
    ("share", "passes"),
    [
        (0.2, [(f"{BOTH}; served 1000", 0)]),
        (0.2, [(f"{BOTH}; served 0", 2)]),
        (0.0, [(f"{BOTH}; served 1000", 2)]),
        (0.2, [(f"{BOTH.replace('a50000', 'a1500')}; served 1000; now 1.5", 2)]),  # not so late
        # It has had its turn, and used more than its share: the next one waits until there is more.
        (0.2, [(f"{BOTH}; served 1000", 0), (f"{SECOND}; served 1100; gone 0:1v100", 2),
               (f"{SECOND}; served 3000", 1)]),
        # Unused share adds up to a pool at most.
        (0.2, [(f"{LARGE}; served 1000000", 0), (f"{SECOND}; served 1000000; gone 0:1v100", 2)]),
        # A job that leaves unserved hands its share on.
        (0.2, [(f"{BOTH}; served 1000", 0), (f"{SECOND}; served 1000", 1)]),
        # A job with room on a decode server has had its turn: its KV is on its way.
        (0.2, [(f"{BOTH}; served 1000", 0), (f"{SECOND}; served 1000; run 0:100", 2)]),
        # A job without room for its adapter keeps its turn, but blocks no other job's turn.
        (0.2, [(f"{BOTH}; served 1000", 0), (f"{BOTH}; served 1000; fits 1 2 3", 1),
               (f"{BOTH}; served 1000", 1)]),
        # A request that has begun has no share.
        (0.2, [(f"{BOTH.replace(f'{SOON} 1', f'{SOON}+1~ 1')}; served 1000", 1)]),
    ],
)  # fmt: skip
def test_starved_requests_have_their_share_by_arrival(
    share: float, passes: list[tuple[str, int]]
) -> None:
    story = server(starved_share=share)
    for situation, first in passes:
        assert story.plan(situation).split()[0] == str(first)


@pytest.mark.parametrize(("served", "order"), [(10_000, "0 1 2 3 4"), (10_001, "0 3 1 2 4")])
def test_requests_without_deadlines_get_a_share_after_a_long_wait(served: int, order: str) -> None:
    """That is when the server has served more than a KV pool since the first of them came."""
    soon = " ".join(f"{n}:100{SOON}" for n in range(3))
    queue = f"wait {soon} 3:100%200 4:100%200s10000; now 50; slots 0"
    story = server()
    assert story.plan(f"{queue}; served {served}").split(";")[0] == order
    gone = queue.replace(" 3:100%200", "", 1)
    assert story.plan(f"{gone}; served {served}").split(";")[0] == "0 1 2 4"
    # If no other job waits, they are ordered by length.
    story.plan(f"{queue}; served {served}")
    assert story.plan("wait 3:100 4:100 5:100%20; slots 0").split(";")[0] == "5 3 4"
