"""Writes the comparison as one HTML file without external links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.engines.clock.device import device_note
from bench.experiment.records import Record
from bench.experiment.spec import Experiment
from bench.experiment.stats import headline
from bench.experiment.table import rows
from predictor_store.terminal import can_plot

_STYLE = Path(__file__).with_suffix(".css")


def write_report(experiment: Experiment, found: Sequence[Record], path: Path) -> None:
    """Write settings, table and plot of a comparison with at least one valid run."""
    records = [record for record in found if not record.problem]
    seeds = {record.seed for record in records}
    settings = records[0].about["settings"]
    first, note = records[0].arm, device_note(settings)
    sections = [
        *(f"<p><b>{escape(line)}</b></p>" for line in (headline(records), note) if line),
        f"<p>Medians over {len(seeds)} seeds. Ratios are to <b>{escape(first)}</b> on the same "
        "arrivals, median over seeds with their range. TTLT: time to last token. Slowdown: TTLT "
        "over the TTLT that the request would have on an idle server; the largest, and means of "
        "the shortest and longest third of the answers. Waited: TTLT less the TTLT on an idle "
        "server. Arrivals: how long requests came, in mean TTLTs. Drain: what the server took "
        "after the last arrival.</p>",
        html_table(experiment, records),
        _invalid(found),
        *_picture(records),
        "<h2>Settings</h2>",
        _settings(settings),
    ]
    write_page(path, "sage-sched: policies compared on real servers", sections)


def _picture(records: Sequence[Record]) -> list[str]:
    if not can_plot():
        return []
    from bench.experiment import plot  # matplotlib takes a second to load

    figure = f"<figure>{plot.mean_against_tail(records)}</figure>"
    return ["<h2>Mean against tail, by arrival rate</h2>", figure]


def write_page(path: Path, title: str, sections: Sequence[str]) -> None:
    """Write a page of these pieces of HTML, below the title."""
    page = "\n".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(title)}</title><style>{_STYLE.read_text(encoding='utf-8')}</style>",
            f"<article><h1>{escape(title)}</h1>",
            *sections,
            "</article></html>\n",
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def html_table(experiment: Experiment, records: Sequence[Record]) -> str:
    """Return the table of rows() as HTML, with our policies marked."""
    head, body = rows(experiment, records)
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [f'<div class="wide"><table><tr>{cells}</tr>']
    for row in body:
        mark = ' class="ours"' if "`sage`" in row else ""
        cells = "".join(f"<td>{escape(cell.strip('`'))}</td>" for cell in row)
        lines.append(f"<tr{mark}>{cells}</tr>".replace(" (", "<br>("))  # intervals below
    return "\n".join([*lines, "</table></div>"])


def _invalid(found: Sequence[Record]) -> str:
    items = "".join(
        f"<li>{escape(f'{lost.arm}, {lost.load}, seed {lost.seed}: {lost.problem}')}</li>"
        for lost in found
        if lost.problem
    )
    return f"<p>Left out as invalid:</p><ul>{items}</ul>" if items else ""


def _settings(settings: Mapping[str, Any]) -> str:
    items = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in settings.items()
    )
    return f"<dl>{items}</dl>"
