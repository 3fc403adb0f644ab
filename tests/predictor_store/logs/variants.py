"""The same requests as various tools write them, after variants.toml."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """at_s: after the first. ttlt_s: to its last token."""

    at_s: float
    inputs: int
    outputs: int
    number: int

    @property
    def start_s(self) -> float:
        return 1_790_000_000.0 + self.at_s

    @property
    def ttlt_s(self) -> float:
        return 0.3 + self.outputs / 64

    @property
    def end_s(self) -> float:
        return self.start_s + self.ttlt_s

    @property
    def text(self) -> str:
        return f"Question number {self.number}: why?"

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": self.text}]

    @property
    def usage(self) -> dict[str, Any]:
        details = {"reasoning_tokens": 3}
        return {"prompt_tokens": self.inputs, "completion_tokens": self.outputs,
                "total_tokens": self.inputs + self.outputs,
                "completion_tokens_details": details}  # fmt: skip


def made(num: int = 60, rate: float = 4.0) -> list[Asked]:
    rng, at_s, found = random.Random(3), 0.0, list[Asked]()
    for number in range(num):
        found.append(Asked(round(at_s, 3), rng.randint(40, 900), rng.randint(8, 700), number))
        at_s += rng.expovariate(rate)
    return found


def date(seconds: float, zone: str = "Z", mark: str = "T") -> str:
    when = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    return when.isoformat(mark, "microseconds") + zone


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
ANSWER = {"role": "assistant", "content": "So."}


def _values(a: Asked) -> dict[str, Any]:
    """Return the values that a template can name. 9 prompt tokens are cached, 5 output tokens are
    reasoning."""
    system, question = a.messages
    chat = {"messages": a.messages, "system": system, "question": question, "usage": a.usage,
            "call": CALL, "answer": ANSWER}  # fmt: skip
    found = {name: json.dumps(value) for name, value in chat.items()}
    for name in ("messages", "call"):
        found[f"escaped_{name}"] = found[name].replace('"', '\\"')
    found["csv_messages"] = found["messages"].replace('"', '""')
    for name, at_s in (("start", a.start_s), ("end", a.end_s)):
        day, _, hour = date(at_s, "").partition("T")
        found |= {f"{name}_date": f"{day}T{hour}", f"{name}_day": day, f"{name}_hour": hour}
        for unit, per_s in (("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
            found[f"{name}_{unit}"] = str(round(at_s * per_s))
    return found | {
        **a._asdict(), "text": a.text, "start_s": a.start_s, "end_s": a.end_s, "ttlt_s": a.ttlt_s,
        "at_ms": round(a.at_s * 1e3), "ttlt_ms": a.ttlt_s * 1e3, "created": int(a.start_s),
        "end_after_s": a.at_s + a.ttlt_s, "uncached": a.inputs - 9, "said": a.outputs - 5,
        "total": a.inputs + a.outputs, "pause_s": a.outputs / 128, "session": a.number // 4,
        "previous": a.number - 1, "blocks": [*range(-(-a.inputs // 16))],
    }  # fmt: skip


def filled(template: str, a: Asked) -> str:
    return Template(template).substitute(_values(a))


class Variant(NamedTuple):
    """See variants.toml."""

    format: str
    row: str
    has: str = ""
    resolution_s: float = 1e-3
    head: str = ""
    whole: str = ""
    num_notes: int = 0
    num_failed: int = 0
    no_request: Sequence[str] = ()
    left_out: Sequence[str] = ()
    found: Sequence[tuple[str, str]] = ()

    def changed(self, a: Asked, fields: str) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(filled(self.row, a))
        return row | json.loads(filled(fields, a))

    def write(self, asked: Iterable[Asked]) -> str:
        rows = [filled(self.row, a) for a in asked]
        if self.whole:
            return Template(self.whole).substitute(rows=",\n".join(rows))
        return "".join(f"{line}\n" for line in (self.head, *rows) if line)


_TEXT = Path(__file__).with_name("variants.toml").read_text("utf-8")
VARIANTS = {
    name: Variant(format_, **fields)
    for format_, variants in tomllib.loads(_TEXT).items()
    for name, fields in variants.items()
}
