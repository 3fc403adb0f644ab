"""Shows records as tables, in the terminal or as Markdown, and renews the tables of pages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.experiment import goodput, records
from bench.experiment.records import Record
from bench.experiment.spec import Experiment, Load, names
from bench.experiment.stats import median, of_arm, ordered, ratio
from bench.policies.arm import Arm

_HEADINGS: dict[str, tuple[str, float]] = records.METRIC_LISTS["headings"]
_TABLES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("pages.toml").read_text(encoding="utf-8")
)
_BEST: dict[str, Callable[..., str]] = {"min": min, "max": max}
_ENGINES = {"sim": "simulated", "clock": "device clock", "server": "servers"}


def rows(experiment: Experiment, found: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return the table: its head, and a row for each load, engine and arm.

    Ratios are to the experiment's reference, or to the first arm that the load has.
    """
    engines = ordered(record.engine for record in found)
    loads = ordered(record.load for record in found)
    lead = [*(["load"] if len(loads) > 1 else []), *(["by"] if len(engines) > 1 else []), "policy"]
    head = [
        *lead,
        *(f"{_unitless(_named(metric)[0])}, ratio" for metric in experiment.ratios),
        *(_named(metric)[0] for metric in experiment.columns),
    ]
    body = []
    for load in loads:
        for engine in engines:
            here = [r for r in found if (r.load, r.engine) == (load, engine)]
            arms = ordered(record.arm for record in here)
            reference = experiment.reference if experiment.reference in arms else arms[:1]
            for arm in arms:
                ours = of_arm(here, load, arm)
                theirs = of_arm(here, load, "".join(reference))
                body.append(
                    [
                        *([load] if len(loads) > 1 else []),
                        *([_ENGINES.get(engine, engine)] if len(engines) > 1 else []),
                        f"`{arm}`",
                        *(_ratio(ours, theirs, metric) for metric in experiment.ratios),
                        *(_value(ours, metric) for metric in experiment.columns),
                    ]
                )
    return head, body


def as_experiment(found: Sequence[Record], **fields: Any) -> Experiment:
    """Return the experiment that records describe, if no file has it. fields: see Experiment."""
    arms, loads = (ordered(getattr(r, of) for r in found) for of in ("arm", "load"))
    about: dict[str, Any] = {"name": "records", "title": "", **fields}
    return Experiment(
        arms=[Arm(policy=arm) for arm in arms],
        loads=[Load(name=load, mix=load) for load in loads],
        **about,
    )


def experiment_named(name: str, found: Sequence[Record]) -> Experiment:
    """Return an experiment from its file; if the file is gone, the experiment that its records
    describe."""
    return Experiment.read(name) if name in names() or not found else as_experiment(found)


def _named(metric: str) -> tuple[str, float]:
    """Return a metric's heading and scale. If it covers some classes alone, the heading names
    them."""
    base, _, classes = metric.partition(":")
    heading, scale = _HEADINGS.get(base, (base.replace("_", " "), 1.0))
    return (f"{classes.replace('+', ', ')}: {heading}" if classes else heading), scale


def _unitless(heading: str) -> str:
    return re.sub(r", (s|ms|requests/s)$", "", heading)


def _ratio(ours: Sequence[Record], theirs: Sequence[Record], metric: str) -> str:
    found = ratio(ours, theirs, metric)
    return "" if found is None else str(found)


def _value(ours: Sequence[Record], metric: str) -> str:
    return _shown(median(ours, metric), metric)


def _shown(number: float, metric: str) -> str:
    value = number * _named(metric)[1]
    return "" if value != value else f"{round(value):d}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(experiment: Experiment, found: Sequence[Record]) -> str:
    """Return a Markdown table, with the commands that made it below."""
    return _lines(*rows(experiment, found), found)


def within_slo(found: Sequence[Record]) -> str:
    """Return a Markdown table of requests per second within the SLO, with the commands that made
    it."""
    return _lines(*goodput.rows(found), found)


def _lines(head: Sequence[str], body: Sequence[Sequence[str]], found: Sequence[Record]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]
    return "\n".join([*lines, "", _made_by(found)])


def plain(experiment: Experiment, found: Sequence[Record]) -> str:
    """Return a table for a terminal."""
    return aligned(*rows(experiment, found))


def aligned(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return columns of equal width, with a line below the head."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _made_by(found: Sequence[Record]) -> str:
    """Return the command and commit of each record."""
    said = []
    for made_by in dict.fromkeys(record.made_by for record in found):
        seeds = {r.seed for r in found if r.made_by == made_by}
        about = [f"commit {made_by.commit}" if made_by.commit else ""]
        about += [f"{len(seeds)} seeds" if len(seeds) > 1 else ""]
        said.append(f"`{made_by.command}` ({', '.join(filter(None, about))})")
    return "Made by " + "; ".join(dict.fromkeys(said)) + "."


_BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.S)


def renewed(page: str, records_of: Callable[[str], Sequence[Record]]) -> str:
    """Return a page with its tables of figures made again.

    A table stands between `<!-- figures: NAME -->` and `<!-- end -->`; NAME is a table of
    pages.toml. Raises ValueError if no record holds a figure.
    """

    def block(match: re.Match[str]) -> str:
        table = _TABLES[match["name"]]
        cells: list[str] = table["cells"]
        rows = [
            [said, *(figure(cell.format(key, *key.split(";")), records_of) for cell in cells)]
            for key, said in map(_row, table["rows"])
        ]
        lines = [f"|{'|'.join(cells)}|" for cells in (table["head"], *rows)]
        lines.insert(1, "|---" * len(table["head"]) + "|")
        return "\n".join([match[1], *lines, "", match["end"]])

    return _BLOCK.sub(block, page)


def _row(row: str | list[str]) -> tuple[str, str]:
    """Return the key of a row of pages.toml, and its first cell: by default the key itself."""
    key, said = (row, f"`{row}`") if isinstance(row, str) else row
    return key, said


def figure(named: str, records_of: Callable[[str], Sequence[Record]]) -> str:
    """Return one number in the form of the tables.

    named: `EXPERIMENT;LOAD;ARM;METRIC`, and `;ENGINE` unless it is sim. Instead of ARM,
        `ARM/REFERENCE` gives their median ratio, and `min` or `max` the value of the best arm, and
        its name. `EXPERIMENT;MIX;ARMS;good@0.99` gives goodput.figure, and `METRIC@0.99` another
        metric at that rate. Raises ValueError if no record holds it.
    """
    name, load, arms, metric, *engine = named.split(";")
    here = [record for record in records_of(name) if [record.engine] == (engine or ["sim"])]
    ours, *theirs = (of_arm(here, load, arm) for arm in arms.split("/"))
    if arms in _BEST:
        tried = ordered(record.arm for record in here if record.load == load)
        best = _BEST[arms](tried, key=lambda arm: median(of_arm(here, load, arm), metric))
        return f"`{best}` {_value(of_arm(here, load, best), metric)}"
    metric, _, share = metric.partition("@")
    if share and metric == "good":
        text = goodput.figure(here, load, arms, float(share))
    elif share:
        text = _shown(goodput.metric_within(here, load, arms, metric, float(share)), metric)
    elif theirs:
        found = ratio(ours, theirs[0], metric)
        text = "" if found is None else f"{found.value:.2f}"
    else:
        text = _value(ours, metric)
    if not text:
        raise ValueError(f"no record holds the figure {named!r}")
    return text


def stale(pages: Sequence[Path], folder: Path = records.FOLDER) -> Iterator[tuple[Path, str]]:
    """Yield the pages whose tables differ from the records, and their new text."""
    records_of = cache(lambda name: records.read(records.file_of(name, folder)))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        new = renewed(text, records_of)
        if new != text:
            yield page, new
