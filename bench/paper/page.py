"""The evaluation as an HTML page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import matplotlib.pyplot as plt
import numpy as np

from bench.comparison.plots import STYLE, colors, svg_text
from bench.paper.cases import Figure
from bench.paper.report import Outcomes, heading, values

_BY_STRENGTH = ", by strength"


def html(figures: Sequence[Figure], outcomes: Outcomes, about: str) -> str:
    """One page that needs nothing beside it."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>SageSched, re-run</title>',
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;"
        "padding:0 1rem}svg{max-width:100%;height:auto}</style>",
        f"<h1>SageSched's evaluation, re-run in the simulator</h1><p>{escape(about)}</p>",
    ]
    for figure in figures:
        parts += [
            f"<h2>{escape(heading(figure))}</h2><p>The paper: {escape(figure.claim)}.</p>",
            _plot(figure, outcomes),
        ]
    return "\n".join([*parts, "</html>\n"])


def _plot(figure: Figure, outcomes: Outcomes) -> str:
    return front(figure, outcomes) if figure.is_front else _bars(figure, outcomes)


def front(figure: Figure, outcomes: Outcomes) -> str:
    """Mean TTLT against p99 as SVG, a panel a column, a mark a row: medians over seeds. Rows that
    differ in one parameter alone, "policy, parameter …", are joined by a line."""
    palette = colors(list(dict.fromkeys(_family(name) for name, _ in figure.rows)))
    for family in palette:  # a policy and its strengths are of one colour
        palette[family] = palette.get(family.removesuffix(_BY_STRENGTH), palette[family])
    num_across = 4
    num_down = 1 + len(figure.columns) // num_across  # the last place is the legend's
    with plt.rc_context(STYLE):
        canvas, axes = plt.subplots(
            num_down, num_across, figsize=(13, 3.4 * num_down), layout="constrained", squeeze=False
        )
        for axis, (column, title) in zip(axes.flat, enumerate(figure.columns), strict=False):
            for family, color in palette.items():
                rows = [cases for name, cases in figure.rows if _family(name) == family]
                points = [
                    [
                        float(np.median(values(outcomes, row[column], field)))
                        for field in ("mean_ttlt_s", "p99_ttlt_s")
                    ]
                    for row in rows
                ]
                x, y = zip(*points, strict=True)
                axis.plot(x, y, "o-", color=color, label=family, lw=0.8, ms=5)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("mean TTLT, s")
            axis.set_ylabel("p99, s")
        labels = axes.flat[0].get_legend_handles_labels()
        for axis in axes.flat[len(figure.columns) :]:
            axis.set_axis_off()
        axes.flat[-1].legend(*labels, fontsize=8, loc="center")
        return svg_text(canvas)


def _family(name: str) -> str:
    return name.split(", ")[0] + _BY_STRENGTH if ", " in name else name


def _bars(figure: Figure, outcomes: Outcomes) -> str:
    """Bars of mean TTLT and of mean TTFT by column and row, with the range over seeds."""
    palette = colors([name for name, _ in figure.rows])
    with plt.rc_context(STYLE):
        canvas, axes = plt.subplots(2, 1, figsize=(11, 6), layout="constrained", sharex=True)
        width = 0.85 / len(figure.rows)
        for axis, field in zip(axes, ("mean_ttlt_s", "mean_ttft_s"), strict=True):
            for place, (name, cases) in enumerate(figure.rows):
                seeds = [values(outcomes, case, field) for case in cases]
                middle = np.array([np.median(v) for v in seeds])
                spread = [
                    middle - [v.min() for v in seeds],
                    np.array([v.max() for v in seeds]) - middle,
                ]
                axis.bar(
                    np.arange(len(cases)) + place * width, middle, width, yerr=spread,
                    color=palette[name], label=name, error_kw={"lw": 0.7},
                )  # fmt: skip
            axis.set_ylabel(f"{'mean TTLT' if 'ttlt' in field else 'mean TTFT'}, s")
        axes[1].set_xticks(np.arange(len(figure.columns)) + 0.42, figure.columns)
        axes[0].legend(fontsize=8, ncols=4)
        return svg_text(canvas)
