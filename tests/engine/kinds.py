"""Servers that tests share, by kind. Tests set their policies while they run. Each is made in a
folder of its own, and is not started yet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import requests

from bench.engines.server.server import Server
from predictor_store.probe.file import fingerprint
from predictor_store.urgency.head import UrgencyHead, hashed
from tests.checks.exactness import TWO_RANKS, TWO_REPLICAS
from tests.engine import saboteur, stage
from tests.engine.serving import CHECKED, UNHURRIED, SageServer
from tests.predictor_store.probes import probe
from tests.test_docs import install_example

BIN = Path(sys.executable).parent
# However long a prediction takes.
PATIENT = "[predictor]\ndeadline_ms = 600000.0\n"
# A prefill step is soon worth its while, on any host.
COSTLY_PREFILLS = "[step_time]\nprefill_base_ms = 1.0\nprefill_token_ms = 1.0\n"
CHUNK_TOKENS = 64
# Six may run, and requests yield most often under this policy: every time that their age has
# doubled. It goes by tokens alone.
YIELDING = """
[policy.fastserve]
refresh_interval_tokens = 2
quantum_ms = 6.0
max_preemptions = 1000
[step_time]
decode_base_ms = 6.0
prefill_base_ms = 6.0
prefill_token_ms = 0.0
[preemption]
enabled = true
"""
YIELDING_FLAGS = ["--max-total-tokens", "640", "--max-running-requests", "6"]
_ONE_SLOT = """
[urgency]
model = "{model}"
[hints]
trust = "body"
[policy.deadlines]
default_slo_ms = 60000.0
[slo]
trust = "body"
[slo.classes.emergency]
priority = 10
urgency = 1
[slo.classes.bulk]
priority = -10
urgency = 5
"""
_CLASSES = """
[hints]
trust = "body"
[slo]
trust = "header"
default = "default"
[slo.classes.interactive]
priority = 10
weight = 10.0
ttft_slo_ms = 3600000.0
tpot_slo_ms = 60000.0
[slo.classes.default]
ttft_slo_ms = 3600000.0
tpot_slo_ms = 60000.0
min_ttft_slo_ms = 1000.0
[slo.classes.rare]
priority = 5
max_share = 0.01
[slo.classes.bulk]
priority = -10
fair = true
[slo.classes.late]
priority = 3
ttft_slo_ms = 0.001
tpot_slo_ms = 60000.0
[slo.classes.late-and-dear]
priority = 2
weight = 10.0
ttft_slo_ms = 0.001
tpot_slo_ms = 60000.0
[policy.proserve]
density = "expected"
starved_share = 0.0
"""


def yielding(model: Path, folder: Path) -> SageServer:
    """Its requests yield, its swapping can be spoilt (saboteur.py), and it writes a trace."""
    return SageServer(
        model,
        folder,
        flags=[*YIELDING_FLAGS, "--sage-trace", str(folder / "trace.jsonl")],
        env=CHECKED | saboteur.install(folder),
        settings=f"{PATIENT}{YIELDING}",
        policy="fastserve",
    )


def two_ranks(model: Path, folder: Path) -> SageServer:
    """Like `yielding`, on two ranks, with SGLang's priorities, an admin's key, and a probe that
    says anything at all."""
    probe(fingerprint(model)).write(folder / "probe")
    return SageServer(
        model,
        folder,
        flags=[
            *YIELDING_FLAGS,
            *("--tp-size", "2", "--admin-api-key", stage.ADMIN_KEY),
            "--enable-priority-scheduling",
        ],
        env=CHECKED | TWO_RANKS | saboteur.install(folder),
        settings=f'{YIELDING}[probe]\nfile = "{folder / "probe"}"\n',
        policy="fastserve",
    )


def one_slot(model: Path, folder: Path) -> SageServer:
    """Requests run one by one, by urgency or under the policy of docs/policies.md. Level 2 is
    guessed for bleeding patients."""
    weights = np.zeros((1 << 15, 6), np.float32)
    weights[hashed("bleeds"), 1] = 100.0
    UrgencyHead(weights, np.array([0.0, 0, 20, 0, 0, 0]), 1.0, 4.0).write(folder / "model")
    return SageServer(
        model,
        folder,
        flags=["--max-running-requests", "1"],
        env=CHECKED | install_example(folder),
        settings=_ONE_SLOT.format(model=folder / "model"),
        policy="urgency",
    )


def foreseeing(model: Path, folder: Path) -> SageServer:
    """The cap of 250 tokens has room three times."""
    return SageServer(
        model, folder, flags=["--max-total-tokens", "800"], settings=f"{PATIENT}{COSTLY_PREFILLS}"
    )


def classes(model: Path, folder: Path) -> SageServer:
    """Classes of requests, SGLang's priorities, and prompts in chunks."""
    return SageServer(
        model,
        folder,
        flags=[
            "--max-running-requests", "3", "--max-total-tokens", "1024",
            "--chunked-prefill-size", str(CHUNK_TOKENS), "--enable-mixed-chunk", "--enable-metrics",
            "--enable-priority-scheduling",
        ],
        settings=_CLASSES,
        policy="proserve",
    )  # fmt: skip


def replicas(model: Path, folder: Path) -> SageServer:
    """Two, among which SGLang chooses."""
    return SageServer(
        model,
        folder,
        flags=["--dp-size", "2", "--max-running-requests", "8"],
        env=TWO_REPLICAS,
        settings=PATIENT,
    )


def several(model: Path, folder: Path) -> SageServer:
    """Two HTTP processes, with an admin's key."""
    return SageServer(
        model,
        folder,
        flags=["--tokenizer-worker-num", "2", "--admin-api-key", stage.ADMIN_KEY],
        env=CHECKED | UNHURRIED,
        settings=PATIENT,
    )


NAMES = ("yielding", "two_ranks", "one_slot", "foreseeing", "classes", "replicas", "several")


def settings(server: Server, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's settings, after a change if one is given."""
    key = {"Authorization": f"Bearer {stage.ADMIN_KEY}"}
    path = f"{server.url}/sage/settings"
    if changes is None:
        answer = requests.get(path, headers=key, timeout=300)
    else:
        answer = requests.post(path, json=changes, headers=key, timeout=300)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found
