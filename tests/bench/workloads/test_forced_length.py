"""Answers end at their recorded length on real servers, even if they are retracted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.engines.server.policy_server import CPU_ENV, CPU_FLAGS
from bench.engines.server.server import Server
from bench.workloads.forced_length import LENGTH_KEY, ForcedLength

LENGTHS = (1, 2, 5, 37, 120, 250)
RETRACT = {"SGLANG_TEST_RETRACT": "1"}  # SGLang's own fault injection: requests yield under way
CASES = {
    "overlap, chunked prefill": ("--chunked-prefill-size", "16"),
    "no overlap": ("--disable-overlap-schedule",),
}


def ask(server: Server, number: int, length: int, temperature: float) -> dict[str, Any]:
    body = {
        "text": f"Question {number}: " + "word " * (7 * number),
        "sampling_params": {
            "max_new_tokens": 400,
            "temperature": temperature,
            "custom_params": {LENGTH_KEY: length},
        },
        "custom_logit_processor": ForcedLength.to_str(),
    }
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    response.raise_for_status()
    meta: dict[str, Any] = response.json()["meta_info"]
    return meta


@pytest.mark.server
@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_answers_end_at_their_length(flags: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    flags = (*CPU_FLAGS, "--enable-custom-logit-processor", *flags)
    jobs = [(i, length, 0.6 * (i % 2)) for i, length in enumerate(LENGTHS * 3)]
    sampling = {"max_new_tokens": 30, "ignore_eos": True}
    plain = {"text": "Hello", "sampling_params": sampling}
    with (
        Server(model, flags, log=tmp_path / "log", env=CPU_ENV | RETRACT) as server,
        ThreadPoolExecutor(len(jobs) + 1) as pool,
    ):
        answers = pool.map(lambda job: ask(server, *job), jobs)
        # A request without a recorded length is left alone.
        other = pool.submit(requests.post, f"{server.url}/generate", json=plain, timeout=300)
        metas = list(answers)
        assert other.result().json()["meta_info"]["completion_tokens"] == 30
    assert [meta["completion_tokens"] for meta in metas] == [length for _, length, _ in jobs]
    assert {meta["finish_reason"]["type"] for meta in metas} == {"stop"}
    assert sum(meta["num_retractions"] for meta in metas) > 0
