"""Reads and writes a server's recording of hidden states and answers, in a folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import LengthDistribution
from sage_sched.errors import UserError

ROWS, ANSWERS = ".rows", ".answers.jsonl"
_ABOUT = "about.json"


class RecordingError(UserError, ValueError):
    """The folder holds no recording, or two that do not match."""


def row_type(num_layers: int, hidden_size: int) -> np.dtype[np.void]:
    """Return the type of a row: its request, its age, and the layers' states."""
    states = ("states", "<f2", (num_layers, hidden_size))
    return np.dtype([("arrival", "<i8"), ("age", "<i4"), states])


def about_recording(
    folder: Path, about: dict[str, Any], opener: Callable[[str, int], int] | None = None
) -> None:
    """Record the layers, hidden_size and fingerprint of the states in their folder. Raises OSError,
    and RecordingError if the folder holds states of another model or other layers."""
    path = folder / _ABOUT
    if path.exists():
        known = json.loads(path.read_text())
        if known != about:
            raise RecordingError(f"{folder} holds states of {known}, but these are of {about}")
        return
    with open(path, "w", opener=opener) as file:
        json.dump(about, file)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Rows of states, and the answers that they belong to.

    states: float16, (rows, layers, hidden).
    ages: the age of each row, in tokens.
    answer: the position of each row's answer.
    lengths, is_cut, caps, forecasts: one value for each answer.
    prompts: the prompt of each answer, as numbers that are equal for equal prompts.
    """

    layers: tuple[int, ...]
    fingerprint: str
    states: NDArray[np.float16]
    ages: NDArray[np.int64]
    answer: NDArray[np.int64]
    lengths: NDArray[np.int64]
    is_cut: NDArray[np.bool_]
    prompts: NDArray[np.uint64]
    caps: NDArray[np.int64]
    forecasts: tuple[LengthDistribution, ...]

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Return the rows whose answers are complete. Raises RecordingError, OSError."""
        if not (folder / _ABOUT).is_file():
            raise RecordingError(f"{folder} holds no recording: it has no {_ABOUT}")
        about = json.loads((folder / _ABOUT).read_text())
        kind = row_type(len(about["layers"]), about["hidden_size"])
        known: dict[tuple[str, int], dict[str, Any]] = {}
        for path in sorted(folder.glob(f"*{ANSWERS}")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut off when the server ended
                    answer = json.loads(line)
                    known[answer["session"], answer["arrival"]] = answer
        place = {key: i for i, key in enumerate(known)}
        states, ages, answers = [], [], []
        for path in sorted(folder.glob(f"*{ROWS}")):
            content = path.read_bytes()
            rows = np.frombuffer(content[: len(content) // kind.itemsize * kind.itemsize], kind)
            session = path.name.partition("-")[0]
            of = np.array([place.get((session, a), -1) for a in rows["arrival"].tolist()], np.int64)
            states.append(rows["states"][of >= 0])
            ages.append(rows["age"][of >= 0].astype(np.int64))
            answers.append(of[of >= 0])
        if not states or not sum(map(len, ages)):
            raise RecordingError(f"{folder} holds no states of answers that are complete")
        found = [*known.values()]
        return cls(
            tuple(about["layers"]),
            about["fingerprint"],
            np.concatenate(states),
            np.concatenate(ages),
            np.concatenate(answers),
            np.array([answer["tokens"] for answer in found], np.int64),
            np.array([answer["is_cut"] for answer in found], bool),
            np.array([int(answer["prompt"], 16) for answer in found], np.uint64),
            np.array([answer["cap"] for answer in found], np.int64),
            tuple(LengthDistribution.from_fields(answer) for answer in found),
        )
