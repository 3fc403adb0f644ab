"""The arms of best effort and latency-sensitive requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.comparison.layer_cuts import COLUMNS, main, row, taken_apart
from bench.comparison.qllm_arms import (
    BE_TOKENS,
    Algorithm1,
    Arm,
    ByFirstChunk,
    arms,
    capacity,
    mixed,
    policy_of,
)
from bench.engines.simulator.presets import MIXTRAL_EXPERTS, MIXTRAL_LAYERS, PRESETS
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Result
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from sage_sched.best_effort import Qllm
from sage_sched.config import SageConfig
from sage_sched.job import Hints

ENGINE = PRESETS["a100-mixtral-8x7b"]


def served(arm: Arm, *requests: SimRequest) -> Result:
    engine = arm.engine(ENGINE)
    policy = policy_of(arm, engine, 1.0)
    return simulate(engine, policy, SageConfig(), requests, Options(preempt=True, check=True))


def request(at_s: float, urgency: int, num_tokens: int, answer: int = 8) -> SimRequest:
    one = mixed(1.0, 1, 0, be_tokens=BE_TOKENS)[0]
    about = {"arrival_s": at_s, "input_tokens": num_tokens, "output_tokens": answer}
    return replace(one, **about, hints=Hints(urgency=urgency))  # type: ignore[arg-type]


def test_a_fifth_is_sensitive_and_short_and_what_is_foreseen_is_not_the_answer() -> None:
    requests = mixed(5.0, 2_000, 3, be_tokens=BE_TOKENS)
    sensitive = [one for one in requests if one.hints.urgency == 2]
    assert len(sensitive) / len(requests) == pytest.approx(0.2, abs=0.03)
    assert {one.class_name for one in sensitive} == {"LS"}
    assert max(one.input_tokens for one in sensitive) <= 60
    assert min(one.input_tokens for one in requests if one not in sensitive) >= 2_000
    assert requests[-1].arrival_s == pytest.approx(2_000 / 5.0, rel=0.1)
    distribution = requests[0].distribution
    assert distribution is not None
    assert len(distribution.lengths) > 1


def test_nobody_joins_the_chunks_of_c_but_those_of_d() -> None:
    long, short = request(0.0, 3, 3_000), request(0.1, 2, 30)
    ends_s = served(Arm("c", ByFirstChunk, 512), long, short).ttft_s
    assert ends_s[1] > ends_s[0] - 0.1
    assert served(Arm("d", Qllm, 512), long, short).ttft_s[1] < 0.3


def test_algorithm_1_fills_prefills_and_starves_best_effort_while_anybody_decodes() -> None:
    running, short, long = request(0.0, 2, 30, 128), request(0.01, 3, 30), request(0.02, 3, 3_000)
    result = served(Arm("", Algorithm1), running, short, long)
    assert result.ttft_s[1] > result.ttlt_s[0] - 0.01
    together = served(Arm("", Algorithm1), request(0.0, 2, 30), replace(long, arrival_s=0.0))
    assert together.ttft_s[0] == together.ttft_s[1]  # its filler's prefill is its own
    apart = served(Arm("", Qllm), request(0.0, 2, 30), replace(long, arrival_s=0.0))
    assert apart.ttft_s[0] < together.ttft_s[0] / 5


def test_finer_cuts_and_chunks_let_the_sensitive_wait_less() -> None:
    rate = 0.7 * capacity(ENGINE, 60, BE_TOKENS)
    requests = mixed(rate, 60, 0, be_tokens=BE_TOKENS)
    by_label = {arm.label: arm for arm in arms(MIXTRAL_LAYERS, MIXTRAL_EXPERTS)}
    assert len(by_label) == len(arms(MIXTRAL_LAYERS, MIXTRAL_EXPERTS)) == 19
    labels = ("a: `fcfs`", "b: prompt by prompt", "e: cut by 1 layer, prompt by prompt")
    is_ls = np.array([one.class_name == "LS" for one in requests])
    waits = [served(by_label[label], *requests).ttft_s[is_ls].mean() for label in labels]
    assert waits[0] > waits[1] > waits[2]


def test_a_row_is_of_each_class() -> None:
    requests = [request(0.0, 2, 50, 32), request(0.0, 3, 2_000, 32)]
    requests = [
        replace(one, class_name=name) for one, name in zip(requests, ("LS", "BE"), strict=True)
    ]
    found = dict(zip(COLUMNS, row(requests, [1.0, 2.0], [4.1, 10.0]), strict=True))
    assert found["LS TTFT p99, s"] == found["LS TTFT mean, s"] == 1.0
    assert found["LS TPOT, ms"] == pytest.approx(100)
    assert found["BE turnaround, s"] == 10.0
    assert found["BE tokens/s"] == pytest.approx(203.2)
    assert found["tokens/s"] == pytest.approx(211.4)


def test_the_gain_is_the_product_of_its_steps() -> None:
    found = {
        (1.0, arm.label): [0.0, 0.0, 2.0 ** -number, 0.0, 0.0, 0.0, 0.0]
        for number, arm in enumerate(arms(MIXTRAL_LAYERS, MIXTRAL_EXPERTS))
    }  # fmt: skip
    steps = taken_apart(found, 1.0)
    assert [name for name, _ in steps] == ["order", "prompts", "chunks", "layers", "experts"]
    last = max(
        number
        for number, arm in enumerate(arms(MIXTRAL_LAYERS, MIXTRAL_EXPERTS))
        if arm.about == "experts"
    )
    assert np.prod([gain for _, gain in steps]) == pytest.approx(2.0**last)


def test_the_command_prints_a_row_an_arm_and_draws(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["--seeds", "1", "--num-requests", "30"]
    assert main(few) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n| e: cut by 1 layer |") == 2
    assert main([*few, "--loads", "1.2", "--ls-share", "0", "--free-reads"]) == 0
