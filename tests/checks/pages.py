"""Write the tables of docs that come from the code: `python -m tests.checks.pages`.

A page has them between `<!-- from code: NAME -->` and `<!-- end -->`; NAME is a key of TABLES.
Tables of measurements are made by `sage-sched bench table --pages`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from patches.http.gateways import AGENT_HINTS, CLASS_HEADERS, HEADERS
from patches.refusals import REFUSED
from patches.series import SERIES
from predictor_store.logs.registry import FORMATS
from sage_sched.app.config import SageConfig, StepTimeConfig
from sage_sched.cli import COMMANDS, OF_SERVERS
from sage_sched.policies.sage import SageParameters
from sage_sched.slo import SloClass

ROOT = Path(__file__).parents[2]
MODES = ROOT / "tests" / "engine" / "modes.toml"
_BLOCK = re.compile(r"(<!-- from code: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def settings() -> Iterator[tuple[str, ...]]:
    """Yield the head and a row per field of the configuration."""
    yield "Setting", "Default", "Meaning"
    config = SageConfig()
    for section in fields(SageConfig):
        if section.name == "policy":
            yield from _rows("policy.sage", SageParameters)
        elif section.name != "step_time":
            yield from _rows(section.name, type(getattr(config, section.name)))
        if section.name == "slo":
            yield from _rows("slo.classes.NAME", SloClass)
    first, *_, last = (field.name for field in fields(StepTimeConfig))
    yield f"`step_time.{first}` … `{last}`", "learned", _words(inspect.getdoc(StepTimeConfig))


def _rows(section: str, of: type[Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row per field, with the text below it in the class. Raises KeyError without one."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    assert isinstance(body, ast.ClassDef)
    said = {
        field.target.id: below.value.value
        for field, below in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }
    for field in fields(of):
        if field.name != "classes":  # a section of its own
            is_text = isinstance(field.default, str)
            default = f'`"{field.default}"`' if is_text else str(field.default).lower()
            yield f"`{section}.{field.name}`", default, _words(said[field.name])


def _words(text: object) -> str:
    return " ".join(str(text).split("\n\n")[0].split())


def metrics() -> Iterator[tuple[str, ...]]:
    """Yield the head and a row per series of /metrics."""
    yield "Series, after `sage:`", "Kind", "Meaning"
    for name, series in SERIES.items():
        by = ", ".join(f"`{label}`" for label in series.labels)
        yield f"`{name}`", series.kind, f"{series.what} Labels: {by}." if by else series.what


def commands() -> Iterator[tuple[str, ...]]:
    """Yield the head and a row per command."""
    yield "Command", "Does"
    for name, (_, what) in (OF_SERVERS | COMMANDS).items():
        yield f"`{name}`", what


def refused() -> Iterator[tuple[str, ...]]:
    """Yield the head and a row per way to run SGLang that is refused."""
    yield "Asked for", "Reason"
    for name, reason in REFUSED.items():
        yield re.sub(r"(--[a-z-]+|SGLANG_\w+)", r"`\1`", name), reason


def modes() -> Iterator[tuple[str, ...]]:
    """Yield the head and a row per way to run SGLang that was tried."""
    yield "Flag or feature", "Served", "Requests are preempted"
    for mode in tomllib.loads(MODES.read_text(encoding="utf-8"))["modes"]:
        yield mode["flag"], mode["served"], mode["preempts"]


def gateways() -> Iterator[tuple[str, ...]]:
    """Yield the head and a row per header or field of others that is a hint."""
    yield "Header or field", "Our hint"
    fields_of_body = {f"nvext.agent_hints.{name}": hint for name, hint in AGENT_HINTS.items()}
    for name, hint in (HEADERS | fields_of_body).items():
        yield f"`{name}`", hint.replace("_", " ") if hint == "expected_tokens" else f"`{hint}`"
    for name in CLASS_HEADERS:
        yield f"`{name}`", "the class"


def formats() -> Iterator[tuple[str, ...]]:
    """Yield the head and a row per format of logs."""
    yield "`--format`", "What it is", "What it has"
    for each in FORMATS:
        yield f"`{each.name}`", each.title, each.gives


TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    "settings": settings, "metrics": metrics, "commands": commands, "modes": modes,
    "refused": refused, "gateways": gateways, "formats": formats,
}  # fmt: skip


def stale(pages: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the pages whose tables differ from the code, each with its new text."""

    def block(match: re.Match[str]) -> str:
        head, *rows = TABLES[match[2]]()
        lines = [f"|{'|'.join(cells)}|" for cells in (head, *rows)]
        lines.insert(1, "|---" * len(head) + "|")
        return "\n".join([match[1], *lines, "", match[3]])

    for page in pages:
        text = page.read_text(encoding="utf-8")
        if (new := _BLOCK.sub(block, text)) != text:
            yield page, new


def main() -> int:
    """Write the pages that are out of date."""
    for page, text in stale(sorted((ROOT / "docs").glob("*.md"))):
        page.write_text(text, encoding="utf-8")
        print(f"{page.name}: tables made again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
