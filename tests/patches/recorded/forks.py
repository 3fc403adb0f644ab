"""Runs situations, each in a process of its own: a program for tests/nursery.py."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from bench.engines.server.model import NUM_SPECIAL_TOKENS, write_model
from predictor_store.probe.file import fingerprint
from tests.patches.recorded.asks import NUM_WORDS
from tests.predictor_store.probes import probe

# The slow imports, which are the same for all. The second needs the first.
_IMPORTED = ("sglang.srt.managers.scheduler", "sglang.srt.models.registry")


def main() -> None:
    """Write the records of each situation to NAME.json, or its error to NAME.error. Arguments: a
    folder, and names of situations."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for module in _IMPORTED:
        importlib.import_module(module)
    # Only now, because the plugin finds the kind of a process by its imported modules.
    importlib.import_module("sglang.srt.plugins").load_plugins()
    os.chdir(folder)
    for model, num_layers in (("model", 1), ("deep", 3)):
        write_model(
            Path(model), num_layers=num_layers, hidden_size=8, num_heads=1, num_kv_heads=1,
            vocab_size=NUM_SPECIAL_TOKENS + NUM_WORDS, weights=model == "deep",
        )  # fmt: skip
    probe(fingerprint(Path("deep")), hidden_size=8, layer=1).write(Path("probe"))
    gc.collect()
    gc.freeze()  # garbage collection in the forks would copy all of this process's memory
    for name in names:
        if os.fork() == 0:
            try:
                _run(name)
            except BaseException:
                Path(f"{name}.error").write_text(traceback.format_exc())
            os._exit(0)
        os.wait()


def _run(name: str) -> None:
    from tests.patches.recorded.server import RecordedServer
    from tests.patches.recorded.situations import SITUATIONS

    situation = SITUATIONS[name]
    folder = Path(name)
    folder.mkdir()
    os.environ |= {"XDG_CACHE_HOME": str(folder.absolute()), **situation.env}
    server = RecordedServer(folder, situation)
    server.run()
    Path(f"{name}.json").write_text(json.dumps(server.records.lines))
