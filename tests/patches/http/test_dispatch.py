"""The router in the HTTP process, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from patches.carrier import encode, encode_hints
from patches.compat import UnsupportedServerError
from patches.http import dispatch as dispatching
from patches.http.dispatch import Dispatch
from patches.messages import StepTimes
from patches.refusals import refuse_dispatch
from patches.scheduler import hooks as scheduler_hooks
from sage_sched.app.config import SageConfig, StepTimeConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.fields import ConfigError
from sage_sched.job import Hints

Carried = dict[str, Any] | None


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
# What requests carry that are foreseen to be so.
LONG = encode(LengthDistribution.from_samples([4000], "history"))
SHORT = encode(LengthDistribution.from_samples([10], "history"))


def dispatch(loads: Sequence[SimpleNamespace] = LOADS, config: SageConfig = OURS) -> Dispatch:
    return Dispatch(2, config, SimpleNamespace(read_all=lambda: loads))


def request(rid: str, carried: Carried = None, **change: Any) -> Any:
    fields = {
        "rid": rid,
        "input_ids": [1, 2, 3],
        "sampling_params": SimpleNamespace(max_new_tokens=4096, custom_params=carried),
        "lora_id": None,
        "extra_key": None,
        "cache_salt": None,
        "routed_dp_rank": None,
    }
    return SimpleNamespace(**fields | change)


def sent(router: Dispatch, rid: str, carried: Carried, given: int | None = None) -> int | None:
    asked = request(rid, carried, routed_dp_rank=given)
    router.send(asked, given, [rid] * 100)
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


def test_deadlines_are_told_by_the_replicas_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "time", SimpleNamespace(monotonic=lambda: 100.0))
    router = dispatch(config=SageConfig.parse({"router": {"dispatch": "gorouting"}}))
    soon = SHORT | encode_hints(Hints(ttft_slo_ms=1000.0, tpot_slo_ms=1000.0))

    def ask(number: int, rank: int | None = None) -> int | None:
        asked = request(str(number), soon, input_ids=[number, *range(1000)])
        router.send(asked, rank, [""] * 100)
        picked: int | None = asked.routed_dp_rank
        return picked

    for number, rank in enumerate((0, 0, 1, 1, 1)):
        ask(number, rank)
    assert router.stats()["step_time"]["source"] == "shipped"
    # By an H800's steps what waits takes 0.35 and 0.52 s: room is left at the first.
    assert ask(6) == 1
    router.heard([("6", 1, True)])
    # On these it takes 0.03 and 0.05: none has anything to do.
    fast = replace(StepTimeConfig().step_time(), prefill_token_s=1.7e-5)
    router.updated(StepTimes(seconds=[*astuple(fast)], source="learned"))
    assert ask(7) == 0
    told = router.stats()["step_time"]
    assert (told["source"], told["prefill_token_ms"]) == ("learned", 0.017)


def test_the_http_process_hears_of_steps_where_it_dispatches_alone() -> None:
    heard: list[StepTimes] = []
    news = StepTimes(seconds=[1.0] * 7, source="learned")
    assert msgpack_decode(msgpack_encode(news)) == news
    for config, dp_size, sent in ((OURS, 2, news), (OURS, 1, None), (SageConfig(), 2, None)):
        scheduler: Any = SimpleNamespace(
            server_args=SimpleNamespace(dp_size=dp_size), sage=SimpleNamespace(updated=heard.append)
        )
        assert scheduler_hooks._updated(config, scheduler, news) is sent
    assert heard == [news] * 3


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
    asked = request("d", LONG)
    router.send(asked, None, {"d": None})
    assert router.stats()["num_unfinished"] == [1, 0]


def test_an_error_leaves_the_request_to_sglang() -> None:
    router = Dispatch(2, OURS, SimpleNamespace())  # nothing can be read
    assert sent(router, "a", LONG) is None
    assert router.stats()["num_failed"] == 1
    # Nothing says how long embeddings are.
    asked = request("b", SHORT, input_ids=None)
    fine = dispatch()
    fine.send(asked, None, ["b"])
    assert asked.routed_dp_rank is None
    assert fine.stats()["num_failed"] == 0


def test_a_prefix_of_another_adapter_is_another() -> None:
    router = dispatch()
    prompt = list(range(4000))
    router.send(request("a", SHORT, input_ids=prompt), 1, "a")
    router.heard([("a", 1, True)])
    same = request("b", SHORT, input_ids=prompt)
    router.send(same, None, "b")
    assert same.routed_dp_rank == 1
    router.heard([("b", 1, True)])
    other = request("c", SHORT, input_ids=prompt, lora_id="other")
    router.send(other, None, "c")
    assert other.routed_dp_rank == 0


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
    ],
)
def test_where_it_does_not_see_all_it_is_refused(flag: dict[str, Any], name: str) -> None:
    unset = {"enable_dp_attention": False, "tokenizer_worker_num": 1, "disaggregation_mode": "null"}
    args = SimpleNamespace(**unset | flag)
    with pytest.raises(UnsupportedServerError, match=name):
        refuse_dispatch(args, OURS)
    refuse_dispatch(args, SageConfig())


def test_only_our_dispatchers_are_configured() -> None:
    with pytest.raises(ConfigError, match=r"router\.dispatch.*'gorouting', 'predicted-cost'"):
        SageConfig.parse({"router": {"dispatch": "round_robin"}})


def test_nothing_is_sent_to_the_dead() -> None:
    router = dispatch()
    sent(router, "a", SHORT, given=0)
    sent(router, "b", LONG, given=1)
    assert router.died(0) == ["a"]
    assert router.died(0) == []
    # The one that is left has the work of both, and is numbered as before.
    assert [sent(router, rid, LONG) for rid in "cd"] == [1, 1]
    assert router.send(request("e", SHORT), 0, "bcde") is False
    assert router.send(request("e", SHORT), 1, "bcde") is True
    stats = router.stats()
    assert stats["num_unfinished"] == [0, 4]
    assert stats["dead"] == [0]
