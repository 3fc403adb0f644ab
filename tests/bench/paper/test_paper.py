from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.paper.cases import SUSTAINED, Case, Figure, figures
from bench.paper.page import front
from bench.paper.runs import Evaluation
from bench.workloads import synthetic
from bench.workloads.arrivals import SUSTAINED_SERVICE_TIMES
from bench.workloads.foresight import Foresight, heavy_tailed, with_heavy_tail
from sage_sched.cli import main
from sage_sched.config import PredictorConfig

pytestmark = pytest.mark.slow


def test_every_figure_has_a_case_for_each_cell() -> None:
    known = figures()
    assert len({figure.name for figure in known}) == len(known)
    for figure in known:
        for _, cases in figure.rows:
            assert len(cases) == len(figure.columns)


def test_sustained_load_is_of_one_length_and_one_rate_for_all() -> None:
    workload = synthetic.generate(300, seed=0)
    evaluation = Evaluation(Foresight(workload, PredictorConfig(), len), num_requests=60)
    case = Case(policy="fcfs", load="sustained", of_capacity=True)
    slow, fast = (evaluation.requests(replace(case, rate=rate), seed=0) for rate in (1.0, 2.0))
    # Prompts come again, each as often.
    assert len(slow) > 60
    prompts = Counter((r.input_tokens, r.output_tokens) for r in slow[:60])
    again = Counter((r.input_tokens, r.output_tokens) for r in slow[60:120])
    assert again == prompts
    assert len(fast) == pytest.approx(2 * len(slow), abs=1)
    assert fast[-1].arrival_s == pytest.approx(slow[-1].arrival_s, rel=0.25)
    # Another seed, or another policy, has the same rate; the tuned rival the same requests.
    tuned = replace(case, policy="fcfs@conservativeness=0.1", rate=1.0)
    assert evaluation.requests(tuned, 0) == slow
    saturated = evaluation._saturated(tuned)
    assert slow[-1].arrival_s == pytest.approx(
        saturated.service_s * SUSTAINED_SERVICE_TIMES, rel=0.25
    )
    pulse = evaluation.requests(Case(policy="fcfs", rate=2.0), 0)
    assert len(pulse) == 60
    assert pulse[-1].arrival_s == pytest.approx(30, rel=0.3)
    assert {case.load for case in SUSTAINED.values()} == {"sustained", "bursts"}


def test_a_small_evaluation_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = synthetic.generate(300, seed=0)
    monkeypatch.setattr("bench.paper.command.load_workload", lambda data: workload)
    arguments = ["--figures", "11", "--seeds", "2", "--num-requests", "30"]
    assert main(["bench", "paper", *arguments, "--output", str(tmp_path)]) == 0
    text = (tmp_path / "results.md").read_text()
    assert text in capsys.readouterr().out
    # Three tables of three rules; the first row's ratio to itself is 1.
    assert len(re.findall(r"^\| `sage`.*1\.00 \(1\.00 to 1\.00\).*\|$", text, re.M)) == 3
    assert len(re.findall(r"^\| `sage-", text, re.M)) == 6
    assert (tmp_path / "report.html").read_text().count("<svg") == 1
    assert main(["bench", "paper", *arguments, "--output", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    (figure,) = (figure for figure in figures() if figure.name == "11")
    cells = [(name, column) for name, _ in figure.rows for column in figure.columns]
    assert [(row["row"], row["column"]) for row in rows] == cells
    assert f"| `sage` | {rows[0]['mean_ttlt_s']:.2f} · 1.00" in text


def test_no_prompt_tells_which_answers_are_heavy() -> None:
    workload = synthetic.generate(2_000, seed=0)
    requests = workload.evaluation
    heavy = heavy_tailed(requests, seed=0)
    factors = np.array(
        [h.output_tokens / r.output_tokens for h, r in zip(heavy, requests, strict=True)]
    )
    assert np.mean(factors > 3) == pytest.approx(0.1, abs=0.04)
    assert [h.prompt for h in heavy] == [r.prompt for r in requests]
    foresight = Foresight(workload, PredictorConfig(), len)
    foresight.read(requests[:20])
    foreseen = foresight.semantic()
    for request in requests[:20]:
        plain, tailed = foreseen(request), with_heavy_tail(foreseen)(request)
        assert plain is not None
        assert tailed is not None
        assert tailed.mean() == pytest.approx((0.9 * 0.2 + 0.1 * 4) * plain.mean(), rel=0.05)
        beyond = tailed.weights[tailed.lengths > 3 * plain.quantile(0.5)].sum()
        assert 0.02 < beyond < 0.12


def test_the_front_has_a_panel_a_column_and_joins_strengths() -> None:
    cases = [(Case(policy=p, rate=1.0), Case(policy=p, rate=2.0)) for p in ("fcfs", "ssjf", "sage")]
    names = ("fcfs", "sage, regret 1", "sage, regret 2")
    figure = Figure("I", "t", "c", ("a regime", "another"), tuple(zip(names, cases, strict=True)))
    outcomes = {
        (case, seed): {"mean_ttlt_s": 10.0 + seed, "p99_ttlt_s": 20.0}
        for row in cases
        for case in row
        for seed in (0, 1)
    }
    drawn = front(figure, outcomes)
    assert drawn.count("mean TTLT, s") == 2
    assert {"a regime", "another"} <= set(re.findall(r">([^<]+)</text>", drawn))
    assert drawn.count("sage, by strength") == 1


def test_an_unknown_figure_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paper", "--figures", "99"]) == 2
    assert "7a, 7b, 8" in capsys.readouterr().err
