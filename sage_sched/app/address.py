"""Parses the address of a predictor service."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

ALLOWED = "a path with a / in it, or host:port"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a service: the path of a Unix socket, or host and port if path is ""."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address; an IPv6 host is in brackets. Raises ValueError unless text is as
        ALLOWED says."""
        if "/" in text and "\0" not in text:
            return cls(path=text)
        tcp = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]\s]+)):(\d{1,5})", text)
        if tcp is None or not 1 <= int(tcp[3]) <= 65_535:
            raise ValueError(f"{text!r} is no address of a service, allowed: {ALLOWED}")
        return cls(host=tcp[1] or tcp[2], port=int(tcp[3]))

    @property
    def is_tcp(self) -> bool:
        return not self.path

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.is_tcp else self.path
