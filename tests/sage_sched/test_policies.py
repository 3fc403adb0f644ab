"""The defining case of each policy, checked by hand, and policies of installed packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.engines.server import plugins
from sage_sched.app import registry
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import (
    ENTRY_POINT_GROUP,
    policy_named,
    policy_names,
    policy_type,
    section_of,
)
from sage_sched.distribution import Refined
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.slo import Proserve, ProserveParameters
from tests.sage_sched.situations import Story, decided, order_of
from tests.sage_sched.strategies import IDLE, SERVER, job, named

NEEDS_NONE = {"fastserve", "fcfs-fill", "uniboost"}
RUN_TO_THE_END = {
    "ssjf", "lpt", "ltr", "uniboost", "fcfs-fill", "makespan", "urgency-order", "tie", "tie-log-t",
}  # fmt: skip
BY_ARRIVAL = {"qllm", "urgency-arrival"}
LONGEST_FIRST = {"lpt", "makespan"}
# SageSched, Fig. 6. Nine in ten end at 10 tokens, and one at 4000: mean 409 against 200.
GAMBLE = "wait 0:100%10x9,4000 1:100%200"
RISK = "wait 0:100%10x9,2000 1:100%220"
# The answers are nearly alike. The cost of output alone ignores the prompts.
LONG_PROMPT = "wait 0:3000%90 1:10%100"
# The first has waited for less, or for more, than four pools of work.
STARVED = "wait 0:100%2000 1:100%10s30000; served"


@pytest.mark.parametrize("name", policy_names())
def test_the_shorter_or_longer_goes_first_and_equals_by_arrival(name: str) -> None:
    assert named(name).can_preempt == (name not in RUN_TO_THE_END)
    assert order_of("wait 2:100%100 0:100%100 1:100%100", name) == "0 1 2"
    if name not in NEEDS_NONE | BY_ARRIVAL:
        expected = "0 2 1" if name in LONGEST_FIRST else "1 2 0"
        assert order_of("wait 0:100%900 1:100%20 2:100%300", name) == expected


@pytest.mark.parametrize(
    ("policy", "parameters", "situation", "order"),
    [
        ("sagesched", {}, GAMBLE, "0 1"),
        ("sagesched", {"index": "mean"}, GAMBLE, "1 0"),
        ("ssjf", {}, GAMBLE, "1 0"),
        ("ltr", {}, GAMBLE, "0 1"),  # the median
        ("sage", {}, GAMBLE, "0 1"),
        ("sage", {}, "wait 0:100%10x9,4000+400 1:100%200", "1 0"),
        ("sagesched", {"cost": "output"}, LONG_PROMPT, "0 1"),
        ("sagesched", {"cost": "overall"}, LONG_PROMPT, "1 0"),
        ("sagesched", {"cost": "resource-bound"}, LONG_PROMPT, "1 0"),
        ("sagesched", {"cost": "seconds"}, LONG_PROMPT, "1 0"),
        ("ltr", {"starvation_pools": 4.0}, f"{STARVED} 30000", "1 0"),
        ("ltr", {"starvation_pools": 4.0}, f"{STARVED} 50000", "0 1"),
        # Mean 209, and 2,000 in the worst tenth: 209 + 0.1 x 2000 against 1.1 x 220.
        ("ssjf", {}, RISK, "0 1"),
        ("tie", {}, RISK, "1 0"),
        ("tie-log-t", {}, RISK, "0 1"),  # one in ten is an outlier of the fit
        # After 120 s, 0.9^4 x 409 = 268 against 242; after 180 s, 0.9^6 x 409 = 217.
        ("tie", {}, f"{RISK}a120000; now 120", "1 0"),
        ("tie", {}, f"{RISK}a180000; now 180", "0 1"),
        # ln(1 / (1 - exp(-0.01))) = 4.6 pools against ln(1 / (1 - exp(-0.5))) = 0.93 pools.
        ("uniboost", {}, "wait 0:5000%5 1:100%5s30000", "1 0"),
        ("uniboost", {}, "wait 0:5000%5 1:100%5s40000", "0 1"),
        ("fcfs-fill", {}, "wait 2:100%9+50 0:100%900 1:100 3:100%1; served 1000000", "0 1 2 3"),
    ],
)
def test_order_of_requests(
    policy: str, parameters: dict[str, Any], situation: str, order: str
) -> None:
    assert order_of(situation, policy, **parameters) == order


def ranked(length: int, input_tokens: int = 100) -> Job:
    return job(0, input_tokens, lengths=(length,))


def yields(policy: Policy, running: Job, waiting: Job, age: int) -> bool:
    running.generated_tokens = age
    return policy.should_preempt(running, waiting, 0.0, IDLE)


def test_trail_uses_hidden_states_and_yields_while_young() -> None:
    running, shorter = ranked(1000), ranked(100)
    policy = named("trail", running, shorter)
    assert policy.key(running, IDLE) == 1000
    for age, second, left in ((0, 1.0, 250), (1, 0.5, 150), (199, 0.5, 150)):
        weights = np.array([1 - second, second])
        running.revise(Refined(age, age + np.array([50.0, 250.0]), weights))
        running.generated_tokens = age
        policy.rank(running)
        assert policy.key(running, IDLE) == left
        assert yields(policy, running, shorter, age)
    # The limit is that of the first prediction, 250.
    assert not yields(policy, running, shorter, 200)


RUN = "run " + " ".join(f"{n}:100%200" for n in range(20))
WAIT = "wait " + " ".join(f"{n}:100%200" for n in range(20, 40))


@pytest.mark.parametrize(
    ("facts", "starts"),
    [
        (f"{WAIT}; slots 1", False),
        (f"{WAIT}; slots 12", True),
        (f"{WAIT.replace('20:100', '20:100@-1')}; slots 1", True),
        (f"{WAIT.replace('20:100', '20:100!')}; slots 1", True),
        (f"{WAIT} 50:100%200~+5; slots 1", True),
        (f"{WAIT}; chunk 50:9000%200/512; slots 1", True),
    ],
)
def test_starts_wait_for_several_slots(facts: str, starts: bool) -> None:
    assert ("decode-only" in decided(f"{RUN}; {facts}", "makespan")) is not starts


def test_swapped_out_jobs_of_a_batch_wait_for_any_time() -> None:
    story = Story("makespan", SageConfig().limits(named("makespan")))
    for now_s in (0, 1, 1_000_000):
        story.plan(f"wait 0:100%1000~+5; now {now_s}; slots 0")
    assert not story.jobs[0].goes_first


@pytest.mark.parametrize("num_going_on", [0, 1])
def test_a_batch_that_is_aborted_leaves_nothing_behind(num_going_on: int) -> None:
    """This holds for any number of arrived requests, and while another request goes on."""
    others = [job(n, 100, lengths=(4000,)) for n in range(2000)]
    story = Story("makespan")
    for one in (*others, *(job(2000 + n, 100, lengths=(20,)) for n in range(num_going_on))):
        story.core.policy.rank(one)
    for one in others[:100]:
        one.grow(640)
    story.core.policy.on_pass(replace(IDLE, running=others[:100]), story.core.queue)
    for one in others:
        story.core.policy.on_end(one, 0.0)
    assert story.plan("wait 3000:100%300 3001:100%50x19,2000") == "+3001 +3000"


def test_a_variant_has_what_it_fixes_and_the_rest_of_its_section() -> None:
    assert policy_type("proserve-expected") is Proserve
    assert section_of("proserve-expected") == section_of("proserve") == "proserve"
    policy = policy_named("proserve-expected", {"proserve": ProserveParameters(eta=9.0)}, SERVER)
    assert policy.parameters == ProserveParameters(eta=9.0, density="expected")


def test_a_trait_outside_the_traits_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Mine\.max_preemptions has no effect"):
        type("Mine", (Policy,), {"max_preemptions": 1})


def test_packages_add_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from sage_sched.policies.sage import Sage\nclass Mine(Sage): pass\n"
    (tmp_path / "theirs.py").write_text(code, encoding="utf-8")
    places = dict.fromkeys(("mine", "urgency", "fcfs"), "theirs:Mine")
    for name, place in {**places, "gone": "nowhere:Mine", "other": "pathlib:Path"}.items():
        plugins.install_as(tmp_path, name, place, ENTRY_POINT_GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_offers", registry._offers.__wrapped__)
    config = SageConfig.parse({"policy": {"sage": {"regret": 0.9}, "mine": {"regret": 0.1}}})
    assert SageConfig.parse(config.sections()) == config
    found = [policy_named(name, config.policy, SERVER).parameters for name in ("sage", "mine")]
    assert found == [config.policy["sage"], config.policy["mine"]]
    assert ("fcfs" in policy_names(), "urgency" in policy_names()) == (False, True)
    for name, said in (
        ("urgency", "two policies 'urgency'"), ("gone", "nowhere:Mine cannot be loaded"),
        ("other", "pathlib:Path is no subclass"), ("sega", "sega"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            policy_type(name)
