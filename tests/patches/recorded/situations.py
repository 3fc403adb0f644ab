"""Situations of a scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortReq,
    CloseSessionReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    OpenSessionReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
)

from patches.messages import EarlyAbort
from tests.patches.recorded.asks import Make, Script, change, send
from tests.patches.recorded.crowds import (
    adapted,
    alike,
    conversation,
    crowd,
    dry_now_and_then,
    malformed,
    of_classes,
    sampling,
    streaming,
    transferred,
    with_logprobs,
)


@dataclass(frozen=True, slots=True)
class Situation:
    """A server with these flags, settings and environment, and its messages.

    sent: each message, with the turn of the scheduler's loop at which it comes.
    moves_a_failure: see Device. most_adapters: in a batch; None if
    requests name none.
    """

    policy: str
    sent: Iterable[tuple[int, Make]]
    flags: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    moves_a_failure: int | None = None
    most_adapters: int | None = None

    def script(self) -> Script:
        script: Script = {}
        for turn, make in self.sent:
            script.setdefault(turn, []).append(make)
        return script


_STARVED = ("--max-total-tokens", "500", "--max-running-requests", "12")
_DECODES = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")
_PYTHON_TREE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
_abort = partial(send, AbortReq)
_update = partial(send, UpdateWeightFromDiskReqInput)
_open = partial(send, OpenSessionReqInput, capacity_of_str_len=1000)


SITUATIONS = {
    # Memory runs out on the device and on the host, and requests are aborted in every state.
    "starved": Situation(
        "sage",
        [
            *crowd(70, sampling),
            *((30 + 7 * n, _abort(rid=f"r{3 * n + 2}")) for n in range(12)),
            (95, send(EarlyAbort, begins="r48", sent_s=1e9)),
        ],
        _STARVED,
        {"preemption": {"host_pool_gib": 1e-5}},
    ),
    "sampled": Situation(
        "fastserve",
        crowd(60, sampling),
        [*_STARVED, "--disable-overlap-schedule"],
        {"decode": {"max_swapped_ms": 200.0}},
    ),
    "spoilt": Situation("fastserve", crowd(70, alike), _STARVED, moves_a_failure=7),
    "adapted": Situation("fastserve", crowd(60, adapted), _STARVED, most_adapters=2),
    "switched": Situation(
        "sage",
        [
            *crowd(90, of_classes),
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
            *crowd(60),
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
        crowd(90, conversation, every=4),
        ["--max-total-tokens", "400", "--page-size", "4", "--chunked-prefill-size", "32"],
        env=_PYTHON_TREE,
    ),
    # The hierarchical cache's host memory takes copies too.
    "tiered": Situation(
        "sage",
        [
            *crowd(80, alike),
            *((30 + 7 * n, _abort(rid=f"r{3 * n + 2}")) for n in range(12)),
            (90, send(PauseGenerationReqInput, mode="retract")),
            (92, send(FlushCacheReqInput)),
            (94, send(ContinueGenerationReqInput)),
        ],
        [
            *_STARVED, "--enable-hierarchical-cache", "--hicache-ratio", "1.7",
            "--hicache-write-policy", "write_back",
        ],
    ),
    "streamed": Situation(
        "sage",
        [
            (1, _open(session_id="s0", streaming=True)),
            (1, _open(session_id="s1")),
            *crowd(40, streaming),
            (70, send(CloseSessionReqInput, session_id="s0")),
            (90, send(CloseSessionReqInput, session_id="s1")),
        ],
        ["--max-total-tokens", "900"],
        env=_PYTHON_TREE,
    ),
    "classes": Situation(
        "proserve",
        crowd(80, of_classes),
        [*_STARVED, "--enable-mixed-chunk", "--chunked-prefill-size", "48"],
        {"policy": {"proserve": {"density": "expected"}}},
    ),
    "priorities": Situation(
        "sage",
        [*crowd(80, of_classes), (90, change(schedule_policy="fcfs"))],
        [*_STARVED, "--enable-priority-scheduling", "--max-queued-requests", "12"],
    ),
    "overloaded": Situation(
        "sage",
        [
            *crowd(80, dry_now_and_then),
            (150, change(schedule_policy="fcfs")),
        ],
        [
            "--max-running-requests", "6", "--enable-priority-scheduling",
            "--disable-priority-preemption", "--schedule-low-priority-values-first",
        ],
        {
            "overload": {"enabled": True, "max_ttft_ms": 800.0},
            "step_time": {"prefill_base_ms": 25.0, "decode_base_ms": 25.0},
        },
    ),
    "timed out": Situation(
        "urgency",
        crowd(70, of_classes),
        [*_STARVED, "--prefill-decode-interval", "3"],
        env={"SGLANG_REQ_WAITING_TIMEOUT": "1.0", "SGLANG_REQ_RUNNING_TIMEOUT": "1.2"},
    ),
    "chunked": Situation(
        "qllm",
        crowd(50, lambda n: {"prompt_tokens": 20 + n * n % 200}),
        ["--max-total-tokens", "450", "--chunked-prefill-size", "32", "--page-size", "8"],
        {"decode": {"max_gap_ms": 60.0}},
    ),
    "probed": Situation(
        "trail",
        [
            *crowd(30, with_logprobs),
            (30, change(schedule_policy="sage")),
            (36, change(schedule_policy="trail")),
            (58, _update(model_path="deep", load_format="auto", flush_cache=False)),
            (62, change(schedule_policy="trail")),  # its probe is of other weights now
        ],
        [*_STARVED, "--model-path", "deep", "--load-format", "auto"],
        {"probe": {"file": "probe"}},
    ),
    # SGLang alone retracts.
    "plain": Situation(
        "fcfs-fill",
        [*crowd(60, malformed), (60, change(decode={"max_gap_ms": 40.0}))],
        [*_STARVED, "--disable-radix-cache", "--max-running-requests", "24"],
        {"preemption": {"enabled": False}},
    ),
    "prefilling": Situation(
        "sage",
        crowd(60, transferred, every=1),
        [
            "--max-total-tokens", "400", "--chunked-prefill-size", "32",
            "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl",
        ],
        {"overload": {"enabled": True, "max_ttft_ms": 50.0}},
        {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"},  # it would wait for CUDA
    ),
    "decoding": Situation(
        "fastserve",
        [
            *crowd(70, transferred),
            *((40 + 9 * n, _abort(rid=f"r{5 * n + 3}")) for n in range(9)),
            (120, change(schedule_policy="fcfs")),
            (150, change(schedule_policy="proserve")),
        ],
        ["--max-total-tokens", "400", "--max-running-requests", "8", "--page-size", "4", *_DECODES],
        most_adapters=2,
    ),
}  # fmt: skip
