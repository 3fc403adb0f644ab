from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from patches.ranker import Ranker

from patches.carrier import encode
from sage_sched.config import PolicyConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.policies.sage import SagePolicy
from tests.sage_sched.strategies import SERVER


def request(lengths: list[int] | None, custom_params: dict[str, Any] | None = None) -> Any:
    """What the ranker reads of sglang.srt.managers.schedule_batch.Req."""
    carried = encode(LengthDistribution.from_samples(lengths, "history")) if lengths else {}
    return SimpleNamespace(
        origin_input_ids=[1] * 20,
        output_ids=[],
        sampling_params=SimpleNamespace(
            max_new_tokens=1000, custom_params={**carried, **(custom_params or {})}
        ),
    )


@pytest.fixture
def ranker() -> Ranker:
    return Ranker("sage", PolicyConfig(), SERVER)


def arrive(ranker: Ranker, *requests: Any) -> list[Any]:
    for req in requests:
        ranker.arrived(req)
    return list(requests)


def test_the_shortest_predicted_goes_first(ranker: Ranker) -> None:
    long_one, short_one = arrive(ranker, request([900] * 9), request([10] * 9))
    queue = [long_one, short_one]
    ranker.sort(queue)
    assert queue == [short_one, long_one]


def test_what_cannot_be_ranked_keeps_its_place(ranker: Ranker) -> None:
    unknown = request(None)
    garbled = request([5], {"__sage_weights": "x"})
    long_one, short_one = request([900] * 9), request([10] * 9)
    queue = arrive(ranker, unknown, long_one, garbled, short_one)
    ranker.sort(queue)
    assert queue == [unknown, short_one, garbled, long_one]
    assert ranker.stats()["num_unranked"] == 2
    assert ranker.stats()["num_garbled"] == 1


def test_the_order_does_not_depend_on_how_the_queue_was_ordered_before(ranker: Ranker) -> None:
    # A queue that one rank alone has reordered must not make it decide otherwise than the others.
    requests = arrive(
        ranker, *(request([10 * i] * 9) if i % 3 else request(None) for i in range(12, 0, -1))
    )
    queue, shuffled = list(requests), requests[5:] + requests[:5]
    ranker.sort(queue)
    ranker.sort(shuffled)
    assert queue == shuffled


def test_a_failing_policy_means_order_of_arrival_and_one_log_line(
    ranker: Ranker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    long_one, short_one = arrive(ranker, request([900] * 9), request([10] * 9))
    queue = [long_one, short_one]
    ranker.sort(queue)

    def fail(self: SagePolicy, job: object, *args: object) -> float:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SagePolicy, "key", fail)
    long_one.output_ids, short_one.output_ids = [1], [1]  # retracted, so ranked anew
    for _ in range(3):
        ranker.sort(queue)
        assert queue == [long_one, short_one]
    assert ranker.stats()["num_policy_errors"] == 3
    assert len(caplog.records) == 1

    monkeypatch.setattr(SagePolicy, "admit", fail)
    newcomer = request([10])
    ranker.arrived(newcomer)
    assert newcomer.sage_job is None

    monkeypatch.undo()
    ranker.sort(queue)
    assert queue == [short_one, long_one]


def test_two_ranks_that_see_the_same_decide_alike() -> None:
    ranks = [Ranker("sage", PolicyConfig(), SERVER) for _ in range(2)]
    orders = []
    for rank in ranks:
        queue = []
        for i in range(200):
            req = request([1 + i * 37 % 700, 1 + i * 53 % 300])
            req.name = i
            rank.arrived(req)
            rank.served(i * 11 % 97)
            queue.append(req)
        rank.sort(queue)
        orders.append([req.name for req in queue])
    assert orders[0] == orders[1]


def test_a_retracted_request_counts_with_its_age(ranker: Ranker) -> None:
    retracted, fresh = arrive(ranker, request([400, 2000] * 20), request([500] * 40))
    retracted.output_ids = [1] * 450
    queue = [retracted, fresh]
    ranker.sort(queue)
    assert queue == [fresh, retracted]


def test_where_memory_runs_out_the_last_of_the_order_goes_first(ranker: Ranker) -> None:
    unknown, long_one, short_one, middle = arrive(
        ranker, request(None), request([900] * 9), request([10] * 9), request([300] * 9)
    )
    # SGLang's own order would retract the one with the fewest tokens, here the short one.
    long_one.output_ids, middle.output_ids = [1] * 30, [1] * 20
    assert ranker.kept_order([unknown, long_one, short_one, middle], [1, 3, 2, 0]) == [2, 3, 1, 0]
    assert ranker.kept_order([unknown, long_one, short_one, middle], [0, 1, 3, 2]) == [0, 2, 3, 1]


def test_a_failing_policy_leaves_retraction_to_sglang(
    ranker: Ranker, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = arrive(ranker, request([900] * 9), request([10] * 9))

    def fail(self: SagePolicy, job: object, *args: object) -> float:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SagePolicy, "key", fail)
    assert ranker.kept_order(running, [0, 1]) == [0, 1]
    assert ranker.stats()["num_policy_errors"] == 1
