"""Replicas of one server (--dp-size 2), and a server within a program."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.kinds import settings
from tests.engine.serving import (
    LONG_PROMPT,
    SHORT_PROMPT,
    SageServer,
    generate,
    states,
    warmed_store,
)
from tests.nursery import Nursery


def test_both_replicas_serve_go_by_new_settings_and_lose_nothing(replicas: SageServer) -> None:
    """SGLang gives each request a rank, and each rank has an order."""
    for policy in ("fcfs", "sage"):
        settings(replicas, {"schedule_policy": policy})
        assert [state["sage"]["schedule_policy"] for state in states(replicas)] == [policy] * 2
        answers = generate(replicas, [f"{SHORT_PROMPT} ({i})" for i in range(48)])
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {0, 1}
        assert len(answers) == 48
    samples = generate(replicas, SHORT_PROMPT, sampling_params={"n": 3, "temperature": 1})
    assert len(samples) == 3
    for rank in (1, 1, 0, 1):
        answer = generate(replicas, SHORT_PROMPT, routed_dp_rank=rank)
        assert answer["meta_info"]["dp_rank"] == rank


def test_the_engine_api(nursery: Nursery, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "sage.yaml"
    config.write_text(f"store: {{path: {warmed_store(tmp_path / 'store')}}}\n")
    code = f"""
import json
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(model_path={str(model)!r}, schedule_policy="makespan", device="cpu",
                           mem_fraction_static=0.1, max_total_tokens=4096)
    prompts = [{SHORT_PROMPT!r}, {LONG_PROMPT!r}]
    answers = engine.generate(prompts, {{"max_new_tokens": 3, "n": 4, "temperature": 1.0}})
    assert len(answers) == 8
    print(json.dumps(engine.get_server_info()["internal_states"][0]["sage"]))
    engine.shutdown()
"""
    result = nursery.run(code, SAGE_CONFIG=str(config))
    assert result.returncode == 0, result.stderr
    stats = json.loads(result.stdout.strip().splitlines()[-1])
    # SGLang first prefills each prompt by a request of its own.
    assert sum(stats["num_ranked"].values()) == 2 * (4 + 1)
