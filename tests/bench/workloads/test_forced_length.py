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
RETRACT = {"SGLANG_TEST_RETRACT": "1"}  # SGLang's own fault injection: it retracts requests


def ask(server: Server, text: str, **sampling: Any) -> dict[str, Any]:
    body = {"text": text, "sampling_params": sampling}
    if "custom_params" in sampling:
        body["custom_logit_processor"] = ForcedLength.to_str()
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    response.raise_for_status()
    return response.json()["meta_info"]  # type: ignore[no-any-return]


@pytest.mark.server
@pytest.mark.parametrize(
    "flags", [("--chunked-prefill-size", "16"), ("--disable-overlap-schedule",)], ids=" ".join
)
def test_answers_end_at_their_length(flags: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    flags = (*CPU_FLAGS, "--enable-custom-logit-processor", *flags)
    lengths = LENGTHS * 3

    def ask_one(number: int) -> dict[str, Any]:
        text = f"Question {number}: " + "word " * (7 * number)
        return ask(
            server, text, max_new_tokens=400, temperature=0.6 * (number % 2),
            custom_params={LENGTH_KEY: lengths[number]},
        )  # fmt: skip

    with (
        Server(model, flags, log=tmp_path / "log", env=CPU_ENV | RETRACT) as server,
        ThreadPoolExecutor(len(lengths) + 1) as pool,
    ):
        # A request without a recorded length is left alone.
        other = pool.submit(ask, server, "Hello", max_new_tokens=30, ignore_eos=True)
        metas = list(pool.map(ask_one, range(len(lengths))))
        assert other.result()["completion_tokens"] == 30
    assert [meta["completion_tokens"] for meta in metas] == [*lengths]
    assert {meta["finish_reason"]["type"] for meta in metas} == {"stop"}
    assert sum(meta["num_retractions"] for meta in metas) > 0
