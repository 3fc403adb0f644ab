"""Situations of a scheduler: what makes each of them special."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import (
    AbortReq,
    CloseSessionReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    OpenSessionReqInput,
    PauseGenerationReqInput,
    SessionParams,
)

from patches.carrier import DRY_RUN, session_of
from patches.messages import EarlyAbort
from sage_sched.job import Hints
from tests.patches.recorded.asks import Ask, Make, Script, change, send


@dataclass(frozen=True, slots=True)
class Situation:
    """A server with these flags, settings and environment, and what it is sent.

    sent: what is sent at which turn of the scheduler's loop.
    moves_a_failure: of so many moves of KV one fails; None if all succeed.
    """

    policy: str
    sent: Iterable[tuple[int, Make]]
    flags: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    moves_a_failure: int | None = None

    def script(self) -> Script:
        script: Script = {}
        for turn, make in self.sent:
            script.setdefault(turn, []).append(make)
        return script


def _crowd(
    number: int, vary: Callable[[int], Mapping[str, Any]] = lambda n: {}, *, every: int = 2
) -> list[tuple[int, Make]]:
    """Requests of many lengths, one at every so many turns. A ninth of them have no prediction, a
    fifth a wrong one. vary: other fields of the n-th Ask."""
    asks = []
    for n in range(number):
        answer_tokens = 2 + n * n % 47
        expected = 60 - answer_tokens if n % 5 == 4 else answer_tokens
        lengths = [] if n % 9 == 8 else [1 + expected // 2, expected, 1 + 2 * expected]
        ask = Ask(n, 10 + 37 * n % 90, answer_tokens, lengths, n % 3, 8)
        asks.append((1 + every * n, replace(ask, **vary(n))))
    return asks


_STARVED = ("--max-total-tokens", "500", "--max-running-requests", "12")
_DECODES = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")
_PYTHON_TREE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
_abort = partial(send, AbortReq)
_open = partial(send, OpenSessionReqInput, capacity_of_str_len=1000)


def _sampling(n: int) -> Mapping[str, Any]:
    """Sampling that a swap has to keep, or that rules preemption out."""
    return {
        "sampling": (
            {}, {"frequency_penalty": 0.5}, {"ignore_eos": True, "max_new_tokens": 9 + n % 20},
            {"repetition_penalty": 1.25}, {"logit_bias": {"9": 1.0}}, {"max_new_tokens": 0},
        )[n % 6]
    }  # fmt: skip


def _class(n: int) -> Mapping[str, Any]:
    name, weight, ttft_ms = (("high", 4.0, 300.0), ("low", 1.0, 900.0), ("", 1.0, None))[n % 3]
    return {
        "hints": Hints(
            weight=weight, ttft_slo_ms=ttft_ms, tpot_slo_ms=ttft_ms and 60.0, slo_class=name,
            urgency=1 + n % 5, tenant=str(n * n % 4), shares_fairly=n % 2 == 0,
        ),
        "others": {"priority": n % 4 if n % 7 else None},
    }  # fmt: skip


def _conversation(n: int) -> Mapping[str, Any]:
    """Conversations of which each is half as lively as the one before. Each turn's prompt begins as
    the one before."""
    session = (~n & n + 1).bit_length()
    turn = min(n >> session, 12)
    return {
        "family": 100 + session, "shared_tokens": 12 + 9 * turn, "prompt_tokens": 21 + 9 * turn,
        "answer_tokens": 3 + n % 11,
        "hints": Hints(session=f"s{session}", pause_ms=50.0 * session, ends_session=turn == 12),
    }  # fmt: skip


def _dry_now_and_then(n: int) -> Mapping[str, Any]:
    return {"carried": DRY_RUN} if n % 6 == 5 else _class(n)


def _transferred(n: int) -> Mapping[str, Any]:
    """Requests whose prompts a prefill server has computed."""
    return {
        **_class(n), "answer_tokens": 5 + n * n % 60,
        "others": {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": n},
    }  # fmt: skip


def _with_logprobs(n: int) -> Mapping[str, Any]:
    return {"others": {"return_logprob": n % 5 == 1, "logprob_start_len": 0}}


def _streaming(n: int) -> Mapping[str, Any]:
    if n % 3:
        return {}
    own = {"session_id": None, "session_params": SessionParams(id=f"s{n % 2}")}
    return {"others": own, "hints": Hints(session=session_of(f"s{n % 2}"))}


SITUATIONS = {
    # Memory runs out on the device and on the host, and requests are aborted in every state.
    "starved": Situation(
        "sage",
        [
            *_crowd(70, _sampling),
            *((30 + 7 * n, _abort(rid=f"r{3 * n + 2}")) for n in range(12)),
            (95, send(EarlyAbort, begins="r48", sent_s=1e9)),
        ],
        _STARVED,
        {"preemption": {"host_pool_gib": 1e-5}},
    ),
    "sampled": Situation(
        "fastserve", _crowd(60, _sampling), [*_STARVED, "--disable-overlap-schedule"]
    ),
    "spoilt": Situation("fastserve", _crowd(60), [*_STARVED], moves_a_failure=11),
    "switched": Situation(
        "sage",
        [
            *_crowd(90, _class),
            (40, change(schedule_policy="fcfs")),
            (60, change(schedule_policy="urgency", policy={"sage": {"no": 1}})),
            (70, change(schedule_policy="urgency")),
            (90, change(preemption={"enabled": False})),
            (110, change(schedule_policy="fastserve", preemption={"enabled": True})),
            (130, change(schedule_policy="proserve", overload={"enabled": True})),
            (150, change(schedule_policy="lpm")),
            (170, change(schedule_policy="trail-prompt", preemption={"host_pool_gib": 2e-5})),
        ],
        [*_STARVED],
        {"step_time": {"decode_base_ms": 30.0}},
    ),
    "paused": Situation(
        "fastserve",
        [
            *_crowd(60),
            (50, send(FlushCacheReqInput)),
            (60, send(PauseGenerationReqInput, mode="retract")),
            (62, send(FlushCacheReqInput)),
            (64, send(ContinueGenerationReqInput)),
            (80, send(PauseGenerationReqInput, mode="in_place")),
            (84, _abort(rid="r39")),
            (85, send(ContinueGenerationReqInput)),
        ],
        [*_STARVED],
    ),
    "sessions": Situation(
        "sage",
        _crowd(90, _conversation, every=4),
        ["--max-total-tokens", "400", "--page-size", "4", "--chunked-prefill-size", "32"],
        env=_PYTHON_TREE,
    ),
    "streamed": Situation(
        "sage",
        [
            (1, _open(session_id="s0", streaming=True)),
            (1, _open(session_id="s1")),
            *_crowd(40, _streaming),
            (70, send(CloseSessionReqInput, session_id="s0")),
            (90, send(CloseSessionReqInput, session_id="s1")),
        ],
        ["--max-total-tokens", "900"],
        env=_PYTHON_TREE,
    ),
    "classes": Situation(
        "proserve",
        _crowd(80, _class),
        [*_STARVED, "--enable-mixed-chunk", "--chunked-prefill-size", "48"],
        {"policy": {"proserve": {"density": "expected"}}},
    ),
    "priorities": Situation(
        "sage",
        [*_crowd(80, _class), (90, change(schedule_policy="fcfs"))],
        [*_STARVED, "--enable-priority-scheduling", "--max-queued-requests", "12"],
    ),
    "overloaded": Situation(
        "sage",
        [
            *_crowd(80, _dry_now_and_then),
            (80, change(overload={"action": "cap", "cap_tokens": 5})),
            (120, change(overload={"action": "behind"})),
        ],
        ["--max-running-requests", "6"],
        {
            "overload": {"enabled": True, "max_ttft_ms": 800.0},
            "step_time": {"prefill_base_ms": 25.0, "decode_base_ms": 25.0},
        },
    ),
    "timed out": Situation(
        "urgency",
        _crowd(70, _class),
        [*_STARVED, "--prefill-decode-interval", "3"],
        env={"SGLANG_REQ_WAITING_TIMEOUT": "1.0", "SGLANG_REQ_RUNNING_TIMEOUT": "1.2"},
    ),
    "chunked": Situation(
        "qllm",
        _crowd(50, lambda n: {"prompt_tokens": 20 + n * n % 200}),
        ["--max-total-tokens", "450", "--chunked-prefill-size", "32", "--page-size", "8"],
    ),
    "probed": Situation(
        "trail",
        [
            *_crowd(30, _with_logprobs),
            (30, change(schedule_policy="sage")),
            (36, change(schedule_policy="trail")),
        ],
        [*_STARVED, "--model-path", "deep", "--load-format", "auto"],
        {"probe": {"file": "probe"}},
    ),
    # SGLang alone retracts.
    "plain": Situation(
        "fcfs-fill",
        [*_crowd(60), (60, change(decode={"max_gap_ms": 40.0}))],
        [*_STARVED, "--page-size", "16", "--max-running-requests", "24"],
        {"preemption": {"enabled": False}},
    ),
    "decoding": Situation(
        "fastserve",
        [
            *_crowd(70, _transferred),
            *((40 + 9 * n, _abort(rid=f"r{5 * n + 3}")) for n in range(9)),
            (120, change(schedule_policy="fcfs")),
            (150, change(schedule_policy="proserve")),
        ],
        ["--max-total-tokens", "400", "--max-running-requests", "8", *_DECODES],
    ),
}  # fmt: skip
