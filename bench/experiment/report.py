"""The comparison as one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.engines.clock.device import device_note
from bench.experiment import plot
from bench.experiment.records import Record
from bench.experiment.spec import Experiment
from bench.experiment.stats import headline, ordered
from bench.experiment.table import rows

Run = Mapping[str, Any]
_STYLE = Path(__file__).with_suffix(".css")


def write_report(
    experiment: Experiment, runs: Sequence[Run], records: Sequence[Record], path: Path
) -> None:
    """Settings, table and plots of a comparison. experiment: what was compared, for its table."""
    valid = [run for run in runs if run["valid"]]
    seeds = sorted({run["seed"] for run in valid})
    first, note = runs[0]["policy"], device_note(valid[0]["settings"])
    sections = [
        *(f"<p><b>{escape(line)}</b></p>" for line in (headline(records), note) if line),
        f"<p>Medians over {len(seeds)} seeds. Ratios are to <b>{escape(first)}</b> on the same "
        "arrivals, median over seeds with their range. TTLT: time to last token. Slowdown: TTLT "
        "over the TTLT that the request would have on an idle server; the largest, and means of "
        "the shortest and longest third of the answers. Waited: TTLT less the TTLT on an idle "
        "server. Arrivals: how long requests came, in mean TTLTs. Drain: what the server took "
        "after the last arrival.</p>",
        html_table(experiment, records),
        _invalid(runs),
        "<h2>Mean against tail, by arrival rate</h2>",
        f"<figure>{plot.mean_against_tail(records)}</figure>",
        "<h2>Settings</h2>",
        _settings(valid[0]),
    ]
    write_page(path, "sage-sched: policies compared on real servers", sections)


def write_page(path: Path, title: str, sections: Sequence[str]) -> None:
    """A page of these pieces of HTML, the title above them."""
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
    """The table of rows(), ours marked."""
    head, body = rows(experiment, records)
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [f'<div class="wide"><table><tr>{cells}</tr>']
    for row in body:
        mark = ' class="ours"' if "`sage`" in row else ""
        cells = "".join(f"<td>{escape(cell.strip('`'))}</td>" for cell in row)
        lines.append(f"<tr{mark}>{cells}</tr>".replace(" (", "<br>("))  # intervals below
    return "\n".join([*lines, "</table></div>"])


def _invalid(runs: Sequence[Run]) -> str:
    lost = [run for run in runs if not run["valid"]]
    if not lost:
        return ""
    reasons = ordered(
        f"{run['policy']}, rate {run['rate']}, seed {run['seed']}: {run['invalid_reason']}"
        for run in lost
    )
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f"<p>Left out as invalid:</p><ul>{items}</ul>"


def _settings(run: Run) -> str:
    items = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in run["settings"].items()
    )
    return f"<dl>{items}</dl>"
