"""Servers that tests share, by kind. Tests set their policies while they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import requests

from bench.engines.server.server import Server
from predictor_store.probe.file import fingerprint
from tests.checks.exactness import TWO_RANKS, TWO_REPLICAS
from tests.engine import saboteur, stage
from tests.engine.serving import CHECKED, UNHURRIED, SageServer
from tests.predictor_store.probes import probe
from tests.test_docs import install_example

BIN = Path(sys.executable).parent
CHUNK_TOKENS = 64
SETTINGS = Path(__file__).with_name("settings")
YIELDING = (SETTINGS / "yielding.toml").read_text()
YIELDING_FLAGS = ("--max-total-tokens", "640", "--max-running-requests", "6")
_ADMIN = ("--admin-api-key", stage.ADMIN_KEY)


class Kind(NamedTuple):
    """flags, settings: FOLDER in them is the server's own. prepare: gets the model and the folder,
    and returns further variables of the environment."""

    flags: tuple[str, ...]
    settings: str = ""
    policy: str = "sage"
    env: Mapping[str, str] = {}
    prepare: Callable[[Path, Path], Mapping[str, str]] = lambda model, folder: {}


def _with_probe(model: Path, folder: Path) -> Mapping[str, str]:
    """Write a random probe, and install the saboteur."""
    probe(fingerprint(model)).write(folder / "probe")
    return saboteur.install(folder)


KINDS = {
    # Requests yield, swaps can be made to fail (saboteur.py), and there is a trace.
    "yielding": Kind(
        (*YIELDING_FLAGS, "--sage-trace", "FOLDER/trace.jsonl"), YIELDING, "fastserve",
        prepare=lambda model, folder: saboteur.install(folder),
    ),
    # The same on two ranks, with SGLang's priorities and a random probe.
    "two_ranks": Kind(
        (*YIELDING_FLAGS, *_ADMIN, "--tp-size", "2", "--enable-priority-scheduling"),
        YIELDING + (SETTINGS / "probed.toml").read_text(), "fastserve", TWO_RANKS, _with_probe,
    ),
    # Pages of 16, no overlap, and host memory that takes the KV of 200 tokens. More requests run
    # than can fit to their end.
    "paged": Kind(
        (
            *YIELDING_FLAGS, "--max-running-requests", "16", "--page-size", "16",
            "--disable-overlap-schedule",
        ),
        f"{YIELDING}host_pool_gib = 0.0002\n", "fastserve",
    ),
    # Requests run one by one: under the policy of docs/policies.md, or with overload protection, to
    # which a second request comes far too late.
    "one_slot": Kind(
        ("--max-running-requests", "1", "--max-queued-requests", "12"),
        (SETTINGS / "one_slot.toml").read_text(), "deadlines",
        prepare=lambda model, folder: install_example(folder),
    ),
    # Two requests with caps of 250 tokens fit. A prefill step is soon worth its cost. Sessions are
    # known, and their KV is kept.
    "foreseeing": Kind(
        ("--max-total-tokens", "640"),
        '[hints]\ntrust = "body"\n[step_time]\nprefill_base_ms = 1.0\nprefill_token_ms = 1.0\n',
        env={"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"},
    ),
    # Classes of requests, SGLang's priorities, and prompts in chunks.
    "classes": Kind(
        (
            "--max-running-requests", "3", "--max-total-tokens", "1024", "--enable-mixed-chunk",
            "--chunked-prefill-size", str(CHUNK_TOKENS), "--enable-priority-scheduling",
        ),
        (SETTINGS / "classes.toml").read_text(), "proserve",
    ),
    # Two replicas, among which SGLang chooses.
    "replicas": Kind(("--dp-size", "2", "--max-running-requests", "8"), env=TWO_REPLICAS),
    # Two HTTP processes.
    "several": Kind(("--tokenizer-worker-num", "2", *_ADMIN), env=UNHURRIED),
}  # fmt: skip


def server_of(name: str, model: Path, folder: Path, *flags: str) -> SageServer:
    """A server of a kind, with further flags, which is not started yet."""
    kind = KINDS[name]
    return SageServer(
        model,
        folder,
        flags=[flag.replace("FOLDER", str(folder)) for flag in (*kind.flags, *flags)],
        env=CHECKED | {**kind.env} | {**kind.prepare(model, folder)},
        settings=kind.settings.replace("FOLDER", str(folder)),
        policy=kind.policy,
    )


def settings(server: Server, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's settings, after a change if one is given."""
    method = "GET" if changes is None else "POST"
    url, key = f"{server.url}/sage/settings", stage.AS_ADMIN
    answer = requests.request(method, url, json=changes, headers=key, timeout=1200)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found
