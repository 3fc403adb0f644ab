"""What `sage-sched doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "FAULT"]


@dataclass(frozen=True, slots=True)
class Finding:
    """about: what was looked at. said: what was found. do: what to do about it, "" if nothing. A
    fault keeps a server from starting, or from being of use; a note does not."""

    level: Level
    about: str
    said: str
    do: str = ""

    def __str__(self) -> str:
        line = f"{self.level:6}{self.about}: {self.said}"
        return f"{line}\n      what to do: {self.do}" if self.do else line


def fault(about: str, said: object, do: str) -> Finding:
    """said: a message of any kind, an exception's too; it becomes one line."""
    return Finding("FAULT", about, " ".join(str(said).split()), do)


def fine(about: str, said: str) -> Finding:
    return Finding("ok", about, said)
