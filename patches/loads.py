"""Extends SGLang's reports for routers: the load of each replica (/v1/loads) gets predicted times,
and the answer to a degraded request says so."""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.load_snapshot import LoadSnapshot

# A key of an answer's meta_info. Its value is a list of one overload.action.
DEGRADED = "sage_overload"


class SageLoad(LoadSnapshot, omit_defaults=True):  # type: ignore[call-arg, misc]
    """The load of a replica, with our section.

    sage: the predicted times of a typical request (patches/scheduler/overload.py).
    """

    sage: dict[str, int] | None = None

    VALID_SECTIONS = LoadSnapshot.VALID_SECTIONS | {"sage"}

    def to_dict(self, include: set[str] | None = None) -> dict[str, Any]:
        load: dict[str, Any] = super().to_dict(include)
        if self.sage is not None and (include is None or include & {"all", "sage"}):
            load["sage"] = self.sage
        return load


def with_outlook(load: LoadSnapshot, outlook: dict[str, int] | None) -> LoadSnapshot:
    """Return the load with the outlook added, if there is one."""
    if outlook is None:
        return load
    fields = {name: getattr(load, name) for name in LoadSnapshot.__struct_fields__}
    return SageLoad(**fields, sage=outlook)


def read_outlooks() -> None:
    """Let SGLang's readers of loads in this process keep our section."""
    load_snapshot.snapshot_decoder = msgspec.msgpack.Decoder(SageLoad)
