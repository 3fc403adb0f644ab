"""The requests of each source. Reported results rest on them, so they have fingerprints."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.policies.arm import Arm
from bench.simulator.presets import H800_QWEN3_32B
from bench.workloads import chats, datasets
from bench.workloads.agents import TRACE
from bench.workloads.arrivals import LOADS, RECORDING, arrivals_of
from bench.workloads.lengths import WithDeadlines
from bench.workloads.prompt_source import load_workload
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import Draw, Purpose
from bench.workloads.sources import source_of
from bench.workloads.triage import LENGTHS, SHARES
from sage_sched.slo import SloClass
from tests.bench.recordings import agents_like, azure_like, triage_like, write
from tests.bench.workloads.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lengths show their origin: 100s are chats, 900s texts, 10s instructions."""

    def save(name: str, *rows: dict[str, Any]) -> None:
        write(tmp_path / f"{name}.jsonl.gz", rows)

    def answer(prompt: str, model: str, tokens: int, **more: Any) -> dict[str, Any]:
        return {"prompt": prompt, "model": model, "output_tokens": tokens, **more}

    models = (datasets.CHAT_MODEL, 100), (datasets.WRITING_MODEL, 900), ("another", 7)
    things = [(i, f"{verb} thing {i}") for i in range(20) for verb in ("Write a", "Why is a")]
    texts = [(f"A report on {i}", 9) for i in range(20)] + [("x", 9000), ("写一篇 report", 9)]
    tasks = ("news_summ", 50), ("qa", 7)
    save("alpaca_eval", *(answer(t, model, n + i) for i, t in things for model, n in models))
    save("alpaca_davinci003", *(
        answer(f"Name {i}", datasets.INSTRUCTION_MODEL, 10 + i) for i in range(20)
    ))  # fmt: skip
    save("longdoc_leval", *(answer("", datasets.SUMMARY_MODEL, n, task=task) for task, n in tasks))
    save("prompts_pubmed", *({"prompt": f"Summarize {i}"} for i in range(20)))
    save("prompts_document_write", *({"prompt": p, "prompt_tokens": n} for p, n in texts))
    save("math_code_reasoning", *(
        answer(f"Prove {i}", model, 9000 * (i % 3) + i, task="math-l5")
        for i in range(20) for model in (datasets.CHAT_MODEL, datasets.RANKED_MODEL)
    ))  # fmt: skip
    save("oasst_model_eval", *(
        answer(f"Chat {i % 6}", datasets.SAMPLED_MODEL, n * i, greedy=i % 11 == 0, sampling=how)
        for i in range(80) for how, n in (("nucleus", 9), ("contrastive", 7))
    ))  # fmt: skip
    quantiles = {"q": [10, 20, 40, 80, 160, 320, 640, 1280]}
    save("servegen_r1_length_quantiles", {"source": "a", "output": quantiles}, {"source": "b"})
    return tmp_path


def test_requests_of_datasets(folder: Path) -> None:
    found = {}
    for name in ("mixed", "real", "repeated", "reasoning", "samples"):
        workload = load_workload(folder, name)
        said = [each.prompt for each in workload.observations()]
        found[name] = fingerprint((workload.history, workload.drawn(40, seed=1), said))
    assert found == {
        "mixed": "fb8cdde6", "real": "73ca3b64", "repeated": "277d744b", "reasoning": "d04aa440",
        "samples": "4cc37358",
    }  # fmt: skip


def test_levels_have_deadlines_but_for_best_effort(folder: Path) -> None:
    source = source_of({"name": "levels"}, H800_QWEN3_32B, folder)
    found = source.requests(Draw(Arm(policy="fcfs"), np.arange(200.0), 3, 600))
    assert [request.arrival_s for request in found] == [*range(200)]
    for request in found:
        hints = request.hints
        level, is_document = hints.urgency, request.input_tokens >= 16 * 2
        said = request.class_name, hints.ttft_slo_ms, hints.tpot_slo_ms, hints.weight, is_document
        slo = (None, None, 1.0) if level == 5 else (2000.0, 100.0, 2.0 if level < 3 else 1.0)
        assert said == (f"{level}", *slo, level == 5)
    shares = np.bincount([request.hints.urgency for request in found], minlength=6)[1:] / 200
    assert np.abs(shares - SHARES).max() < 0.1
    served = source.for_servers(Draw(Arm(policy="fcfs"), np.arange(40.0), 3, 600))
    for request in served:
        level = request.hints.urgency
        assert (len(request.prompt) > 150) == (level == 5)
        of_class = source.slo().classes[request.class_name]
        assert (of_class.urgency, of_class.priority) == (level, source.priority_of(request))


def test_one_tenant_is_heavy_and_shares_are_the_settings_choice(folder: Path) -> None:
    source = source_of({"name": "tenants"}, H800_QWEN3_32B, folder)
    fair = {"slo": {"default": "shared", "classes": {"shared": {"fair": True}}}}
    for settings in ({}, fair):
        arm = Arm(policy="sage", settings=settings)
        found = source.requests(Draw(arm, np.arange(400.0), 3, 600))
        tenants = Counter((each.class_name, each.hints.tenant) for each in found)
        assert 0.6 < tenants.pop(("heavy", "heavy")) / 400 < 0.8
        assert len(tenants) == 20
        assert {kind for kind, _ in tenants} == {"light"}
        assert {each.hints.shares_fairly for each in found} == {bool(settings)}


def test_an_unusable_row_is_named(folder: Path) -> None:
    file = folder / "prompts_pubmed.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "fine"}\n{"text": "no prompt"}\n'))
    with pytest.raises(WorkloadError, match=r"prompts_pubmed\.jsonl\.gz:2 has no prompt"):
        datasets.load_mixed(folder)
    file.unlink()
    with pytest.raises(WorkloadError, match="there is no file"):
        datasets.load_mixed(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agents_like(triage_like(azure_like(tmp_path_factory.mktemp("data"))))


@pytest.mark.parametrize(
    ("workload", "arm", "wanted"),
    [
        ({"name": "chats", "prompt_factor": 3}, {}, "79c1659f"),
        ({"name": "generated"}, {"predictor": "truth", "wrong_by": 2.0}, "f7068592"),
        ({"name": "generated", "classes": ["essay"]}, {"predictor": "input length"}, "0ac4b28a"),
        ({"name": "generated"}, {"predictor": "none", "noise": True}, "0134cef0"),
        ({"name": "two kinds"}, {}, "f640443b"),
        ({"name": "two kinds", "sensitive": False}, {}, "9e121c07"),
        ({"name": "azure", "weights": [2.0, 1.0, 4.0]}, {}, "c6248c76"),
        ({"name": "triage"}, {}, "60010ce7"),
        ({"name": "triage"}, {"said_by": "expert, 0.3 wrong"}, "4126f2cb"),
        ({"name": "triage"}, {"said_by": "chance"}, "fed27118"),
        ({"name": "triage"}, {"said_by": "nobody"}, "75a19388"),
        ({"name": "agents", "max_steps": 5}, {}, "feec71cb"),
        ({"name": "agents"}, {"said_by": "client"}, "cab731af"),
    ],
)
def test_requests(
    workload: Mapping[str, Any], arm: dict[str, Any], wanted: str, data: Path
) -> None:
    folder = None if workload["name"] in ("chats", "generated", "two kinds") else data
    source = source_of(workload, H800_QWEN3_32B, folder)
    of = Arm(**{"policy": "fcfs" if workload["name"] == "chats" else "sage", **arm})
    found = [source.requests(Draw(of, np.arange(30.0), 3, 600, purpose)) for purpose in Purpose]
    assert fingerprint(found) == wanted


def test_arrivals() -> None:
    assert {load: fingerprint(arrivals_of(load, 100, 3)) for load in LOADS} == {
        "pulse": "6351fc00", "sustained": "6351fc00", "batch": "186005ce",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "recording", "missing"),
    [
        ("azure", RECORDING, RECORDING),
        ("triage", LENGTHS, LENGTHS),
        ("agents", TRACE, f"holds no sessions|{TRACE}"),
    ],
)
def test_without_recordings_there_is_nothing_to_simulate(
    name: str, recording: str, missing: str, tmp_path: Path
) -> None:
    folder = agents_like(triage_like(azure_like(tmp_path)))
    for spoil in (lambda file: write(file, [{"session": "a"}]), Path.unlink):
        spoil(folder / recording)
        with pytest.raises(WorkloadError, match=missing):
            source_of({"name": name}, H800_QWEN3_32B, folder)


def test_other_prompts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = json.loads(chats.LENGTHS_FILE.read_text("ascii")) | {"prompts_hash": "of others"}
    (tmp_path / "lengths.json").write_text(json.dumps(known))
    monkeypatch.setattr(chats, "LENGTHS_FILE", tmp_path / "lengths.json")
    with pytest.raises(WorkloadError, match="other prompts"):
        chats.answered()


def test_servers_know_the_classes_of_requests(data: Path) -> None:
    source = WithDeadlines(data, "azure", weights=(2.0, 1.0, 4.0))
    found = source.slo()
    assert found.classes == {
        f"w{weight}": SloClass(priority, weight, ttft_slo_ms=1000.0, tpot_slo_ms=100.0)
        for priority, weight in enumerate((1, 2, 4), 1)
    }
    assert (found.trust, found.first_token_weight) == ("body", pytest.approx(14.0, abs=1))


def test_traffic_shifts_from_chat_to_reasoning_and_back(folder: Path) -> None:
    source = source_of({"name": "shift", "slower": 6.0}, H800_QWEN3_32B, folder)
    arrivals_s = np.arange(130.0)
    found = source.requests(Draw(Arm(policy="sage"), arrivals_s, 3, 16_384))
    phases = [request.class_name for request in found]
    assert phases == ["chat"] * 60 + ["reasoning"] * 10 + ["chat again"] * 60
    came_s = np.array([request.arrival_s for request in found])
    lasted_s = np.diff(came_s[[0, 60, 70, 129]])
    assert lasted_s == pytest.approx(np.full(3, lasted_s.mean()), rel=0.2)
    mixed = source.requests(Draw(Arm(policy="sage"), arrivals_s, 3, 16_384, Purpose.CAPACITY))
    assert [request.arrival_s for request in mixed] == arrivals_s.tolist()
