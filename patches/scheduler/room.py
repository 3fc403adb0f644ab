"""Who may get room for the KV of its prompt in a pass of a decode server."""

from __future__ import annotations

from collections.abc import Sequence

from patches.engine_types import Req


class Room:
    """Who of those that wait may get room in a pass, for SGLang's DecodePreallocQueue. refused: who
    asked last, if there was none."""

    def __init__(self) -> None:
        self._open: set[int] | None = None
        self.refused: Req | None = None

    def go_by_sglang(self) -> None:
        """Everybody may."""
        self._open = self.refused = None

    def open_to(self, reqs: Sequence[Req]) -> None:
        """These alone may."""
        self._open, self.refused = {id(req) for req in reqs}, None

    def needed_tokens(self, req: Req, theirs: int, pool_tokens: int) -> int:
        """KV that has to be free for a request. theirs: by SGLang's count. SGLang gives no room to
        those behind the first that finds none."""
        if self._open is not None and id(req) not in self._open:
            return 2 * pool_tokens
        self.refused = req
        return theirs
