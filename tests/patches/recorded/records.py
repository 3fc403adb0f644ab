"""An operator's view of a server, as lines of text by kind."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from patches.carrier import CLOCK
from patches.series import SERIES
from tests.patches.recorded.device import Clock

_ANSWER = (
    "finished_reasons", "output_ids", "prompt_tokens", "completion_tokens", "cached_tokens",
    "retraction_counts",
)  # fmt: skip
_STAMPS = (
    "wait_queue_entry_time", "forward_entry_time", "prefill_finished_time", "completion_time",
)  # fmt: skip


class Records:
    """The records of one server. lines: by kind."""

    def __init__(self, clock: Clock) -> None:
        self.lines: defaultdict[str, list[str]] = defaultdict(list)
        self._clock = clock

    def add(self, kind: str, *parts: object) -> None:
        self.lines[kind].append(" ".join([f"{self._clock.now_s:.6f}", *map(_plain, parts)]))

    def ran(self, batch: Any) -> None:
        """Add a step: its requests, with the cached and the new tokens of their prompts."""
        requests = [req.rid for req in batch.reqs]
        if batch.forward_mode.is_extend():
            extents = zip(requests, batch.prefix_lens, batch.extend_lens, strict=True)
            requests = [f"{rid}:{cached}+{new}" for rid, cached, new in extents]
        self.add("steps", batch.forward_mode.name, *requests)

    def answered(self, output: Any) -> None:
        """Add what clients get (BatchTokenIDOutput, managers/io_struct.py)."""
        for place, rid in enumerate(output.rids):
            shown = {name: getattr(output, name)[place] for name in _ANSWER}
            stamps = output.time_stats[place]
            shown |= {name: f"{getattr(stamps, name):.6f}" for name in _STAMPS}
            about = output.customized_info or {}
            self.add(
                "outputs", rid, shown | {name: values[place] for name, values in about.items()}
            )

    def scraped(self) -> None:
        """Add our series on /metrics."""
        self.add("metrics", *sorted(_series()))

    def kept(self, folder: Path) -> None:
        """Add the step times in a folder, for any host."""
        for file in sorted(folder.glob("**/*.json")):
            kept = json.loads(file.read_text())
            kept["server"]["hardware"] = "any" if kept["server"]["hardware"] else ""
            self.add("files", kept)


def _series() -> Iterator[str]:
    for family in REGISTRY.collect():
        if family.name.startswith("sage:"):
            own = SERIES[family.name.removeprefix("sage:") + "_total" * (family.type == "counter")]
            for name, labels, value, *_ in family.samples:
                if not name.endswith("_created"):
                    yield _plain([name, *(labels[label] for label in own.labels), value])


def _plain(value: Any) -> str:
    """Return a value as text, without the name of this host's clock. Three digits of a number are
    the same on other processors, which round the sums of a fit otherwise."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{round(value, 5):.3g}")
        if isinstance(value, Mapping):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return [plain(each) for each in value]
        return value

    return str(plain(value)).replace(CLOCK, "clock")
