"""Writes the tables of docs that are generated from code: `python -m tests.checks.pages`.

A page has them between `<!-- from code: NAME -->` and `<!-- end -->`; NAME is a key of TABLES.
`sage-sched bench table --pages` writes the tables of measurements.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

from patches.http.gateways import AGENT_HINTS, CLASS_HEADERS, HEADERS
from patches.refusals import REFUSED
from patches.series import SERIES
from predictor_store.logs.registry import FORMATS
from sage_sched.app.registry import POLICIES
from sage_sched.app.schema import default_of, json_schema, leaves
from sage_sched.commands import COMMANDS, OF_SERVERS
from sage_sched.distribution import LengthDistribution
from sage_sched.fields import allowed
from sage_sched.job import Hints, Job
from sage_sched.plan import NextPlan
from sage_sched.policy import Lasting, Policy, Traits
from sage_sched.steps import ServerFacts, StepTime
from sage_sched.view import SchedulerView

ROOT = Path(__file__).parents[2]
MODES = ROOT / "tests" / "engine" / "modes.toml"
_OWN = ("self", "cls")
_BLOCK = re.compile(r"(<!-- from code: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def settings() -> Iterator[tuple[str, ...]]:
    yield "Setting", "Default", "Allowed", "Meaning"
    for name, leaf in leaves(json_schema(POLICIES)):
        said = re.sub(r"^a (whole )?number (from )?", "", allowed(name, leaf)).removeprefix("a ")
        said = re.sub(r"\b1(0{6,})\b", lambda m: "10" + "⁶⁷⁸⁹"[len(m[1]) - 6], said)
        yield f"`{name}`", f"`{default_of(leaf)}`", said, leaf["description"]


def metrics() -> Iterator[tuple[str, ...]]:
    yield "Series, after `sage:`", "Meaning"
    for name, series in SERIES.items():
        by = ", ".join(f"`{label}`" for label in series.labels)
        yield f"`{name}`", f"{series.what} Labels: {by}." if by else series.what


def commands() -> Iterator[tuple[str, ...]]:
    yield "Command", "Does"
    for name, (_, what) in (OF_SERVERS | COMMANDS).items():
        yield f"`{name}`", what


def refused() -> Iterator[tuple[str, ...]]:
    yield "Asked for", "Reason"
    for name, reason in REFUSED.items():
        yield re.sub(r"(--[a-z-]+|SGLANG_\w+)", r"`\1`", name), reason


def modes() -> Iterator[tuple[str, ...]]:
    yield "Flag or feature", "Served", "Requests are preempted"
    for flag, (served, preempts, *_) in tomllib.loads(MODES.read_text(encoding="utf-8")).items():
        yield flag, served, preempts


def gateways() -> Iterator[tuple[str, ...]]:
    yield "Header or field", "Our hint"
    fields_of_body = {f"nvext.agent_hints.{name}": hint for name, hint in AGENT_HINTS.items()}
    for name, hint in (HEADERS | fields_of_body).items():
        yield f"`{name}`", hint.replace("_", " ") if hint == "expected_tokens" else f"`{hint}`"
    for name in CLASS_HEADERS:
        yield f"`{name}`", "the class"


def formats() -> Iterator[tuple[str, ...]]:
    yield "`--format`", "What it is"
    for each in FORMATS:
        yield f"`{each.name}`", each.title


def members(of: type) -> Iterator[tuple[str, ...]]:
    """Yield the fields that a class's docstring explains, and its public methods."""
    yield "Name", "Meaning"
    said = inspect.getdoc(of) or ""
    for name, what in re.findall(r"^([a-z]\w*(?:, [a-z]\w*)*): (.*(?:\n {4}.*)*)", said, re.M):
        yield f"`{name}`", " ".join(what.split())
    for name, member in vars(of).items():
        named = (getattr(member, kind, None) for kind in ("fget", "func", "__func__"))
        function = next(filter(None, named), member)
        what = inspect.getdoc(function) if inspect.isfunction(function) else ""
        if not what or name.startswith("_") or what.startswith(("Set ", "Reset ")):
            continue
        takes = [each for each in inspect.signature(function).parameters if each not in _OWN]
        called = "" if isinstance(member, property | cached_property) else f"({', '.join(takes)})"
        yield f"`{name}{called}`", " ".join(what.split("\n\n")[0].split())


# Each yields the head of its table, and the rows.
TABLES: dict[str, Callable[[], Iterator[tuple[str, ...]]]] = {
    each.__name__: each for each in (settings, metrics, commands, modes, refused, gateways, formats)
} | {
    each.__name__: partial(members, each)
    for each in (
        Policy,
        Traits,
        NextPlan,
        Lasting,
        Job,
        Hints,
        LengthDistribution,
        SchedulerView,
        ServerFacts,
        StepTime,
    )
}


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
    """Write the outdated pages."""
    for page, text in stale(sorted((ROOT / "docs").rglob("*.md"))):
        page.write_text(text, encoding="utf-8")
        print(f"{page.name}: tables made again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
