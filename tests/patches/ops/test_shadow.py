from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from bench.whatif.read import read_log
from patches.hook import Hooks
from patches.ops import shadow
from patches.ops.shadow import shadow_http_hooks, shadow_scheduler_hooks
from patches.scheduler.step_time_file import StepTimeFile, kind_of
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.steps import StepTime
from tests.engine.serving import wait_until
from tests.patches.http.conftest import EOS, Client, generate
from tests.patches.schedulers import StandInBatch, make_bare_scheduler, make_request

LENGTHS = LengthDistribution.from_samples([*range(1, 90)], "history", weights=range(1, 90))


def by_method(hooks: Hooks) -> dict[str, Callable[..., Any]]:
    return {hook.target.rpartition(".")[2]: hook.hook for hook in hooks}


def whatif_reads(record: Path) -> None:
    one, *_, late = read_log([record]).requests
    assert one.forecast is not None
    assert one.forecast.lengths.tolist() == LENGTHS.lengths.tolist()
    assert one.forecast.crps(20) == pytest.approx(LENGTHS.crps(20))
    assert (late.forecast, late.cap_tokens, late.ttlt_s, late.is_cut) == (None, 128, 3.5, False)


async def receive(hooks: dict[str, Any], manager: Any, requests: Mapping[str, Any]) -> None:
    """Receive requests, given as sampling by id. Two of them get no prediction in time."""
    for rid, sampling in requests.items():
        obj = generate(sampling=sampling, rid=rid)
        obj.normalize_batch_and_arguments()
        manager.rid_to_state[rid] = SimpleNamespace(obj=obj)
        hooks["_init_req_state"](manager, obj)
    await asyncio.sleep(0)
    for rid in ("late", "given up"):
        never = asyncio.get_running_loop().create_future()
        manager.rid_to_state[rid].obj.sage.prediction = never
    never.cancel()


def test_a_server_records_what_it_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks, client, record = by_method(shadow_http_hooks), Client(), tmp_path / "record.jsonl"
    client.distribution = LENGTHS
    monkeypatch.setattr(shadow, "PredictorClient", client.made)
    monkeypatch.setattr(shadow, "time", SimpleNamespace(time=count(1e9 + 0.25, 0.5).__next__))
    server_args = SimpleNamespace(
        _sage_config=SageConfig(), _sage_shadow=str(record), served_model_name="M", model_path="p"
    )
    manager: Any = SimpleNamespace(
        rid_to_state={}, tokenizer=None, server_status=ServerStatus.Up, _server_stop_hook=print,
        model_config=SimpleNamespace(hf_eos_token_id={EOS}),
    )  # fmt: skip
    hooks["__init__"](None, manager, server_args)
    requests = {
        "stopped": {"max_new_tokens": 50, "stop_token_ids": [7]}, "cut": {},
        "unlimited": {"max_new_tokens": None}, "late": {}, "given up": {}, "fills the cache": {},
        "runs": {},
    }  # fmt: skip
    asyncio.run(receive(hooks, manager, requests))
    stop = {"type": "stop", "matched": 7}
    output = SimpleNamespace(
        rids=[*requests, "unknown"],
        finished_reasons=[stop, {"type": "abort"}, {"type": "length"}, *[stop] * 3, None, stop],
        completion_tokens=[3, 4, 5, 6, 6, 0, 7, 8],
        prompt_tokens=[10, 11, 12, 13, 13, 14, 15, 16],
    )
    hooks["_handle_batch_output"](manager, output)
    assert hooks["_handle_batch_output"](manager, None) is None  # a failure costs no answer
    assert (client.model, client.is_started) == ("M", True)
    assert client.heard == [
        ("finished", 1, 10, 3, False, True), ("finished", 2, 11, 4, True, False),
        ("finished", 3, 12, 5, True, False),
    ]  # fmt: skip
    wait_until(lambda: manager.sage.record.stats()["num_written"] == 5)
    fields = (
        "arrival_s", "input_tokens", "output_tokens", "max_new_tokens", "is_cut", "ttlt_s",
        "prediction",
    )  # fmt: skip
    said = shadow.fields_of(LENGTHS)
    assert [json.loads(line) for line in record.read_text().splitlines()] == [
        dict(zip(fields, values, strict=True))
        for values in (
            (1e9 + 0.25, 10, 3, 50, False, 3.5, said), (1e9 + 0.75, 11, 4, 128, True, 3.5, said),
            (1e9 + 1.25, 12, 5, 0, True, 3.5, said), (1e9 + 1.75, 13, 6, 128, False, 3.5, None),
            (1e9 + 2.25, 13, 6, 128, False, 3.5, None),
        )
    ]  # fmt: skip
    whatif_reads(record)

    async def theirs(manager: Any) -> list[dict[str, Any]]:
        return [{"sage": {"gaps": {}}}, {}]

    ours = {"predictor": client.stats(), "shadow": manager.sage.record.stats()}
    states = asyncio.run(hooks["get_internal_state"](theirs, manager))
    assert states == [{"sage": {"gaps": {}, **ours}}, {"sage": ours}]


def test_a_scheduler_measures_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hooks = by_method(shadow_scheduler_hooks(SageConfig()))
    scheduler, result = make_bare_scheduler(_sched_idled=False), SimpleNamespace()
    StepTimeFile(kind_of(scheduler)).write(StepTime(*[0.25] * 7))
    batch = StandInBatch([make_request(answer_tokens=3)])
    batch.forward_mode = ForwardMode.DECODE

    def run(*args: Any, **kw: Any) -> Any:
        return result

    assert hooks["run_batch"](run, scheduler, batch) is result  # before it knows its model
    hooks["init_schedule_policy"](None, scheduler)
    for _ in range(2):
        assert hooks["run_batch"](run, scheduler, batch) is result
        hooks["process_batch_result"](None, scheduler, batch, result)
    told = SimpleNamespace(internal_state={})
    hooks["get_internal_state"](told, scheduler, None)
    stats = told.internal_state["sage"]
    assert (stats["step_time"]["source"], stats["step_time"]["num_steps"]) == ("kept", 1)
    assert stats["gaps"].keys() == {"stayed", "left"}
