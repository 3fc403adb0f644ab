"""The pages of the site, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"


class Block(NamedTuple):
    """A fenced block.

    why_not_run: the comment above it, hidden on the site, that says why no test runs it as it
        stands; "" without one.
    title: "" without one.
    """

    why_not_run: str
    title: str
    code: str


def blocks(page: Path, language: str) -> list[Block]:
    """Return the page's blocks in this language, in order."""
    found = re.findall(
        rf'(?:^<!-- (Not run [^>]*?) -->\n)?^```{language}(?: title="(.*?)")?\n(.*?)^```$',
        page.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    return [Block(why_not_run, title, code.strip()) for why_not_run, title, code in found]
