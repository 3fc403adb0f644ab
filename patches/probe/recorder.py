"""Records hidden states, to train a probe on them."""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patches.engine_types import Batch, Req
from predictor_store.cached_file import own_file
from predictor_store.probe.recording import ANSWERS, ROWS, about_recording, row_type

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 64 << 20
_QUEUE_BATCHES = 256
# Recorded ages: the powers of two below this, its multiples, and one more age per interval, at an
# offset that differs between requests.
_INTERVAL_TOKENS = 32


class Recorder:
    """Records hidden states on rank 0, and the length of each answer once it is known.

    It records the same ages of all requests, and other ages that differ between requests. A thread
    of its own writes. Batches that overflow its queue are dropped, and the oldest segments are
    deleted when the folder is full. States reveal the text, so only the owner can read the files.
    """

    def __init__(self, folder: Path, max_bytes: int, layers: Sequence[int], about: dict[str, Any]):
        """Start recording. Raises OSError.

        layers: the layers to record.
        about: facts about the model.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._max_bytes = folder, max_bytes
        self._type = row_type(len(layers), int(about["hidden_size"]))
        self._session = f"{time.time_ns():020d}"
        self._segment = -1
        self._written_bytes = 0
        self._queue: queue.Queue[tuple[str, bytes]] = queue.Queue(_QUEUE_BATCHES)
        self._is_stopped = False
        self._num_rows = self._num_dropped = 0
        about_recording(folder, {**about, "layers": [*layers]}, own_file)
        self._thread = threading.Thread(target=self._run, daemon=True, name="sage-recorder")
        self._thread.start()

    def read(self, batch: Batch, commits: Sequence[Any], states: Any) -> None:
        """Record the committed tokens of a step (see Probing.read)."""
        if self._is_stopped:
            return
        chosen = [
            (row, req.sage.job.arrival, commit.output_index)
            for row, (req, commit) in enumerate(zip(batch.reqs, commits, strict=True))
            if commit is not None and _is_wanted(commit.output_index, req.sage.job.arrival)
        ]
        if not chosen:
            return
        rows = np.zeros(len(chosen), self._type)
        places, rows["arrival"], rows["age"] = zip(*chosen, strict=True)
        rows["states"] = states[[*places]]
        self._put(ROWS, rows.tobytes(), len(chosen))

    def ended(self, req: Req, num_tokens: int) -> None:
        """Record the length of a complete answer."""
        job = req.sage.job
        if self._is_stopped or not job.is_predicted:
            return
        prompt = hashlib.blake2b(np.array(req.origin_input_ids).tobytes(), digest_size=8)
        answer = {
            "session": self._session,
            "arrival": job.arrival,
            "prompt": prompt.hexdigest(),
            "tokens": num_tokens,
            "is_cut": num_tokens >= job.max_new_tokens,
            "cap": job.max_new_tokens,
            **job.distribution.as_fields(),
        }
        self._put(ANSWERS, (json.dumps(answer) + "\n").encode())

    def _put(self, ending: str, content: bytes, num_rows: int = 0) -> None:
        try:
            self._queue.put_nowait((ending, content))
            self._num_rows += num_rows
        except queue.Full:
            self._num_dropped += max(1, num_rows)

    def _run(self) -> None:
        try:
            while True:
                ending, content = self._queue.get()
                if self._segment < 0 or self._written_bytes > _SEGMENT_BYTES:
                    self._next_segment()
                with open(self._path(ending), "ab", opener=own_file) as file:
                    file.write(content)
                self._written_bytes += len(content)
        except OSError as error:
            self._is_stopped = True
            logger.error("hidden states are no longer recorded: %s", error)

    def _next_segment(self) -> None:
        self._segment, self._written_bytes = self._segment + 1, 0
        oldest_first = sorted(self._folder.glob(f"*{ROWS}"))
        total = sum(path.stat().st_size for path in oldest_first)
        for path in oldest_first:
            if total + _SEGMENT_BYTES <= self._max_bytes:
                break
            total -= path.stat().st_size
            path.unlink()
            path.with_name(path.name.replace(ROWS, ANSWERS)).unlink(missing_ok=True)

    def _path(self, ending: str) -> Path:
        return self._folder / f"{self._session}-{self._segment:06d}{ending}"

    def stats(self) -> dict[str, Any]:
        """Return counters for /server_info."""
        return {
            "num_rows": self._num_rows,
            "num_dropped": self._num_dropped,
            "is_stopped": self._is_stopped,
        }


def _is_wanted(age_tokens: int, arrival: int) -> bool:
    if age_tokens < _INTERVAL_TOKENS and age_tokens & (age_tokens - 1) == 0:
        return True
    return age_tokens % _INTERVAL_TOKENS in (0, arrival * 7919 % _INTERVAL_TOKENS)
