"""The router in the HTTP process, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from patches.compat import UnsupportedServerError
from patches.dispatch import Dispatch, Foreseen, refuse_dispatch
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.fields import ConfigError


def load(rank: int, num_running: int = 0, timestamp: float = 1.0) -> SimpleNamespace:
    """A replica's snapshot."""
    return SimpleNamespace(
        timestamp=timestamp,
        dp_rank=rank,
        num_running_reqs=num_running,
        max_total_num_tokens=8192,
        max_running_requests=16,
    )


LOADS = [load(0), load(1)]
OURS = SageConfig.parse({"router": {"dispatch": "predicted-cost"}})
LONG = Foreseen(LengthDistribution.from_samples([4000], "history"))
SHORT = Foreseen(LengthDistribution.from_samples([10], "history"))


def dispatch(loads: Sequence[SimpleNamespace] = LOADS) -> Dispatch:
    return Dispatch(2, OURS, SimpleNamespace(read_all=lambda: loads))


def request(rid: str, **change: Any) -> Any:
    fields = {
        "rid": rid,
        "input_ids": [1, 2, 3],
        "sampling_params": SimpleNamespace(max_new_tokens=4096),
        "lora_id": None,
        "extra_key": None,
        "cache_salt": None,
        "routed_dp_rank": None,
    }
    return SimpleNamespace(**fields | change)


def sent(router: Dispatch, rid: str, foreseen: Foreseen, given: int | None = None) -> int | None:
    asked = request(rid, routed_dp_rank=given)
    router.send(asked, given, foreseen, [rid] * 100)
    rank: int | None = asked.routed_dp_rank
    return rank


def test_a_request_goes_where_less_work_is_foreseen() -> None:
    router = dispatch()
    assert sent(router, "long", LONG, given=0) == 0
    for number in range(3):
        assert sent(router, f"short {number}", SHORT, given=1) == 1
    assert sent(router, "asked", LONG) == 1
    stats = router.stats()
    assert stats["num_picked"] == [0, 1]
    assert stats["num_given"] == 4
    assert stats["num_unfinished"] == [1, 4]


def test_a_snapshot_says_that_answers_have_begun_of_which_nothing_was_heard() -> None:
    loads = [load(0), load(1)]
    router = dispatch(loads)
    for rid in "abc":
        sent(router, rid, LONG, given=0)
    assert router.stats()["num_waiting"] == [3, 0]
    loads[0] = load(0, num_running=2, timestamp=2.0)
    assert sent(router, "first", SHORT) == 1
    assert router.stats()["num_waiting"] == [1, 1]
    # The same snapshot says nothing of what has ended since.
    router.heard([("a", 9, True)])
    assert sent(router, "second", SHORT) == 1
    assert router.stats()["num_waiting"] == [1, 2]


def test_what_has_ended_counts_no_more() -> None:
    router = dispatch()
    sent(router, "long", LONG, given=0)
    sent(router, "short", SHORT, given=1)
    router.heard([("long", 5, False), ("long", 6, True), ("nobody", 1, True)])
    assert router.stats()["num_unfinished"] == [0, 1]
    assert sent(router, "next", SHORT) == 0


@pytest.mark.parametrize("gone", ["a", "abc"])
def test_what_has_gone_without_a_word_counts_no_more(gone: str) -> None:
    router = dispatch()
    for rid in gone:
        sent(router, rid, LONG, given=0)
    asked = request("d")
    router.send(asked, None, LONG, {"d": None})
    assert router.stats()["num_unfinished"] == [1, 0]


def test_an_error_leaves_the_request_to_sglang() -> None:
    router = Dispatch(2, OURS, SimpleNamespace())  # nothing can be read
    assert sent(router, "a", LONG) is None
    assert router.stats()["num_failed"] == 1
    # Nothing says how long embeddings are.
    asked = request("b", input_ids=None)
    fine = dispatch()
    fine.send(asked, None, SHORT, ["b"])
    assert asked.routed_dp_rank is None
    assert fine.stats()["num_failed"] == 0


def test_a_prefix_of_another_adapter_is_another() -> None:
    router = dispatch()
    prompt = list(range(4000))
    router.send(request("a", input_ids=prompt), 1, SHORT, "a")
    router.heard([("a", 1, True)])
    same = request("b", input_ids=prompt)
    router.send(same, None, SHORT, "b")
    assert same.routed_dp_rank == 1
    router.heard([("b", 1, True)])
    other = request("c", input_ids=prompt, lora_id="other")
    router.send(other, None, SHORT, "c")
    assert other.routed_dp_rank == 0


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
    ],
)
def test_where_it_does_not_see_all_it_is_refused(flag: dict[str, Any], name: str) -> None:
    args = SimpleNamespace(**{"enable_dp_attention": False, "tokenizer_worker_num": 1} | flag)
    with pytest.raises(UnsupportedServerError, match=name):
        refuse_dispatch(args, OURS)
    refuse_dispatch(args, SageConfig())


def test_only_our_dispatchers_are_configured() -> None:
    with pytest.raises(ConfigError, match=r"router\.dispatch.*'predicted-cost', 'gorouting'"):
        SageConfig.parse({"router": {"dispatch": "round_robin"}})


def test_nothing_is_sent_to_the_dead() -> None:
    router = dispatch()
    sent(router, "a", SHORT, given=0)
    sent(router, "b", LONG, given=1)
    assert router.died(0) == ["a"]
    assert router.died(0) == []
    # The one that is left has the work of both, and is numbered as before.
    assert [sent(router, rid, LONG) for rid in "cd"] == [1, 1]
    assert router.send(request("e"), 0, SHORT, "bcde") is False
    assert router.send(request("e"), 1, SHORT, "bcde") is True
    stats = router.stats()
    assert stats["num_unfinished"] == [0, 4]
    assert stats["dead"] == [0]
