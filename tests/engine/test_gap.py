"""decode.max_gap_ms and max_swapped_ms on real servers, by the times that their steps are said to
take."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.checks.exactness import ask, crowd, differences
from tests.engine import stage
from tests.engine.crowds import ask_together
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, wait_until

# A token is prefilled in a millisecond, and a decode step takes 41.
MAX_GAP_MS = 150.0


def longest_gap_ms(server: SageServer, policy: str, max_gap_ms: float | str) -> float:
    """While one answers, two long prompts and a short one come."""
    settings(server, {"schedule_policy": policy, "decode": {"max_gap_ms": max_gap_ms}})
    # Other beginnings, so that the radix tree has nothing of them.
    name = f"{policy} {max_gap_ms}"
    prompts = [f"{name} {i}: " + "And so on and on. " * 40 for i in range(2)] + [name]
    ask = partial(generate, server, sampling_params={"ignore_eos": True})
    with ThreadPoolExecutor(4) as pool:
        with stage.held(server):
            answers = [pool.submit(ask, SHORT_PROMPT, 30)]
            stage.once_arrived(server, 1)
            stage.hold(server, tokens=4)
            stage.once_held(server)
            for number, prompt in enumerate(prompts, 1):
                answers.append(pool.submit(ask, prompt, 6))
                stage.once_arrived(server, number)
        lengths = [answer.result()["meta_info"]["completion_tokens"] for answer in answers]
    assert lengths == [30, 6, 6, 6]
    assert server.stats()["num_policy_errors"] == 0
    return 1e3 * stage.longest_gap_s(server)


@pytest.mark.parametrize("policy", ["sage", "proserve"])
def test_running_requests_keep_getting_tokens(foreseeing: SageServer, policy: str) -> None:
    assert longest_gap_ms(foreseeing, policy, MAX_GAP_MS) <= MAX_GAP_MS


def test_without_a_bound_they_wait_for_whole_prompts(foreseeing: SageServer) -> None:
    assert longest_gap_ms(foreseeing, "sage", "inf") > 2 * MAX_GAP_MS


def test_a_request_that_was_away_for_long_comes_back_first(yielding: SageServer) -> None:
    trace = yielding.log.parent / "trace.jsonl"
    asked = crowd(12, seed=5)
    resumed = yielding.preemption()["num_resumed"]
    settings(yielding, {"schedule_policy": "fastserve", "decode": {"max_swapped_ms": "inf"}})
    before = trace.stat().st_size
    ask_together(yielding, asked)
    generate(yielding, SHORT_PROMPT, rid="without a bound")
    wait_until(lambda: '"ends","rid":"without a bound"' in trace.read_text())
    # Requests are preempted often, and none goes first.
    assert yielding.preemption()["num_resumed"] > resumed
    assert '"goes_first"' not in trace.read_text()[before:]
    settings(yielding, {"decode": {"max_swapped_ms": 1.0}})
    before = trace.stat().st_size
    together = ask_together(yielding, asked)
    settings(yielding, {"decode": {"max_swapped_ms": 60_000.0}})
    wait_until(lambda: '"goes_first"' in trace.read_text()[before:])
    assert differences(together, ask(yielding, asked, 1))[0] == 0
    assert yielding.stats()["num_policy_errors"] == 0
