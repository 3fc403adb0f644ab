"""Made-up probes and recordings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from predictor_store.probe.file import ProbeFile
from predictor_store.probe.recording import ANSWERS, ROWS, about_recording, row_type

EDGES = 50 * np.arange(9)


def probe(
    fingerprint: str = "0123", *, hidden_size: int = 128, layer: int = 0, seed: int = 0
) -> ProbeFile:
    rng = np.random.default_rng(seed)
    bins = EDGES.size - 1
    return ProbeFile(
        rng.normal(size=(16, hidden_size)).astype(np.float32),
        np.zeros(16, np.float32),
        rng.normal(size=(bins, 16)).astype(np.float32),
        np.zeros(bins, np.float32),
        layer=layer,
        fingerprint=fingerprint,
        edges=EDGES,
    )


def write_recording(folder: Path, num_answers: int, session: int = 1) -> None:
    """Write the recording of a model with two layers. Only the states of the second show the length
    left of an answer."""
    rng = np.random.default_rng(session)
    folder.mkdir(parents=True, exist_ok=True)
    about_recording(folder, {"fingerprint": "0123", "hidden_size": 8, "layers": [0, 1]})
    rows, answers = [], []
    for arrival in range(num_answers):
        length = int(rng.choice([20, 400]))
        for age in (0, 1, 2, 4, 8, 16, 32, 64, 96, 128):
            if age < length:
                states = rng.normal(size=(2, 8))
                states[1, 0] = np.log(length - age)
                rows.append((arrival, age, states))
        answers.append(
            {
                "session": str(session), "arrival": arrival, "tokens": length, "is_cut": False,
                "prompt": f"{rng.integers(1 << 62):016x}", "cap": 1000, "lengths": [20, 400],
                "weights": [0.5, 0.5], "effective_samples": 100.0, "source": "history",
            }
        )  # fmt: skip
    (folder / f"{session}-000000{ROWS}").write_bytes(np.array(rows, row_type(2, 8)).tobytes())
    lines = "".join(json.dumps(answer) + "\n" for answer in answers)
    (folder / f"{session}-000000{ANSWERS}").write_text(lines)
