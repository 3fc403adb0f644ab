"""The pages of the site, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
# How the title of a block of commands begins that no test runs; the reason follows.
NOT_RUN = "Not run"


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Title ("" if it has none) and text of the fenced blocks in this language, in their order."""
    found = re.findall(
        rf'^```{language}(?: title="(.*?)")?\n(.*?)^```$',
        page.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    return [(title, code.strip()) for title, code in found]
