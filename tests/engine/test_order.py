"""The order in which a real server starts requests."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import requests

from tests.engine import stage
from tests.engine.crowds import LONG_AND_SHORT, started
from tests.engine.kinds import CHUNK_TOKENS, settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate

DOCUMENT = " ".join(f"clause {i} of the contract" for i in range(80))


def test_short_predictions_go_first(foreseeing: SageServer) -> None:
    settings(foreseeing, {"schedule_policy": "sage"})
    assert started(foreseeing, LONG_AND_SHORT) == ["short", "long"]


def test_a_policy_of_another_package_reads_its_clients_hints(one_slot: SageServer) -> None:
    """It is the policy of docs/policies.md."""
    settings(one_slot, {"schedule_policy": "deadlines"})
    slos_ms = {"late": 50_000.0, "soon": 20_000.0, "sooner": 10_000.0}
    asked: dict[str, dict[str, Any]] = {"none": {}} | {
        rid: {"sampling_params": {"custom_params": {"ttft_slo_ms": slo_ms}}}
        for rid, slo_ms in slos_ms.items()
    }
    assert started(one_slot, asked) == ["sooner", "soon", "late", "none"]
    malformed = {"custom_params": {"ttft_slo_ms": "soon"}}
    with pytest.raises(requests.HTTPError, match="400"):
        generate(one_slot, SHORT_PROMPT, sampling_params=malformed)


def test_one_of_several_questions_computes_their_document(foreseeing: SageServer) -> None:
    settings(foreseeing, {"schedule_policy": "sage"})
    ask = [
        partial(generate, foreseeing, f"All: {DOCUMENT} Question {i}?", rid=str(i))
        for i in range(4)
    ]
    answers = stage.together(foreseeing, ask)
    cached = sorted(answer["meta_info"]["cached_tokens"] for answer in answers)
    document_tokens = min(answer["meta_info"]["prompt_tokens"] for answer in answers) - 20
    assert cached[0] < 20
    assert cached[1] > document_tokens
    # Their answers together are the same as one by one.
    assert [answer["text"] for answer in answers] == [alone()["text"] for alone in ask]


def test_a_short_prompt_overtakes_a_long_one_between_chunks(classes: SageServer) -> None:
    settings(classes, {"schedule_policy": "sage"})
    long_prompt = " ".join(f"paragraph {i} of a long document" for i in range(60))
    alone = [generate(classes, prompt)["text"] for prompt in (long_prompt, SHORT_PROMPT)]
    before = classes.stats()["num_too_long"]
    # Another beginning, so the radix tree has no part of it.
    asked = {"long": "Anew: " + long_prompt, "too long": SHORT_PROMPT * 30, "short": SHORT_PROMPT}
    answers = []
    with ThreadPoolExecutor(3) as pool:
        with stage.held(classes, prefilled=2 * CHUNK_TOKENS):
            for number, (rid, prompt) in enumerate(asked.items(), 1):
                answers.append(pool.submit(generate, classes, prompt, rid=rid))
                stage.once(classes, num_arrived=number)
                stage.once_held(classes)
        long, _, short = (answer.result() for answer in answers)
    assert stage.state(classes)["started"] == ["short", "long", "too long"]
    assert short["text"] == alone[1]
    assert long["meta_info"]["prompt_tokens"] > 4 * CHUNK_TOKENS
    assert classes.stats()["num_too_long"] > before
    assert generate(classes, long_prompt)["text"] == alone[0]


PRIORITIES: dict[str, dict[str, Any]] = {
    "low": {"priority": -20}, "none": {}, "middle": {"priority": 0}, "high": {"priority": 20},
}  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "num_preemptions"), [("sage", (0, 1)), ("fcfs-fill", (0, 1)), ("fcfs", (0, 0))]
)
def test_higher_priorities_of_sglang_go_first_and_two_ranks_agree(
    two_ranks: SageServer, policy: str, num_preemptions: tuple[int, int]
) -> None:
    """A running request yields to a request of high enough priority. Our policies move its KV to
    host memory, SGLang computes it again. SGLang's check ends the ranks if they differ."""
    settings(two_ranks, {"schedule_policy": policy, "preemption": {"enabled": True}})
    assert started(two_ranks, PRIORITIES) == ["high", "middle", "low", "none"]
    assert tuple(num_yielding_to(two_ranks, level) for level in (10, 11)) == num_preemptions


def num_yielding_to(server: SageServer, priority: int, num_slots: int = 6) -> int:
    """Return the number of running requests preempted for a request of this priority."""
    before = server.preemption()["num_preemptions"]
    high: list[Future[Any]] = []

    def ask_high(held: dict[str, Any]) -> None:
        assert len(held["running"]) == num_slots
        high.append(pool.submit(generate, server, SHORT_PROMPT, rid="high", priority=priority))
        stage.once(server, num_arrived=1)

    more: dict[str, Any] = {"priority": 0, "sampling_params": {"ignore_eos": True}}
    low = [partial(generate, server, f"{SHORT_PROMPT} {i}", 60, **more) for i in range(num_slots)]
    with ThreadPoolExecutor(1) as pool:
        answers = stage.together(server, low, ask_high, tokens=5)
    answers.append(high[0].result())
    lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert lengths == [*[60] * num_slots, 4]
    return int(server.preemption()["num_preemptions"] - before)
