"""Draws plots as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

from bench.experiment.goodput import mix_of, multiple_of
from bench.experiment.records import Record
from bench.experiment.stats import ordered

# As many colours as the largest comparison has policies, so that no two are alike.
_COLORS = (
    "#7f7f7f", "#9467bd", "#2ca02c", "#ff7f0e", "#1f77b4", "#8c564b", "#e377c2", "#17becf",
    "#000000", "#bcbd22", "#393b79", "#637939", "#8c6d31", "#7b4173", "#aec7e8", "#98df8a",
    "#ffbb78", "#c5b0d5",
)  # fmt: skip
_OURS = "#d62728"
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "sage-sched",
}


_TEXT_AND_LINES = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def colors(policies: Sequence[str]) -> dict[str, str]:
    """Return one colour per policy, the same in every plot; ours stands out."""
    others = [policy for policy in policies if policy != "sage"]
    palette = {policy: _COLORS[i % len(_COLORS)] for i, policy in enumerate(others)}
    return palette | ({"sage": _OURS} if "sage" in policies else {})


def mean_against_tail(records: Sequence[Record]) -> str:
    """Plot mean TTLT against p99: a mark per arm, a panel per load, medians and ranges over seeds.
    Smaller is better for both."""
    palette = colors(ordered(record.arm for record in records))
    loads = ordered(record.load for record in records)
    with plt.rc_context(STYLE):
        size = (8, 4.5) if len(loads) == 1 else (4.2 * len(loads) + 2, 3.8)
        figure, axes = plt.subplots(
            1, len(loads), figsize=size, layout="constrained", squeeze=False
        )
        for axis, load in zip(axes[0], loads, strict=True):
            for arm, color in palette.items():
                found = [r.metrics for r in records if (r.load, r.arm) == (load, arm)]
                if found:
                    x, across = _spread([m["mean_e2e_latency_ms"] / 1e3 for m in found])
                    y, along = _spread([m["p99_e2e_latency_ms"] / 1e3 for m in found])
                    axis.errorbar(x, y, along, across, fmt="o", color=color, label=arm, lw=0.8)
            axis.set_xscale("log")
            _plain_ticks(axis.xaxis)
            axis.set_xlabel("mean time to last token, s (log)")
            axis.set_ylabel("p99, s")
            axis.set_title(load if len(loads) > 1 else "", fontsize=10)
        axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return svg_text(figure)


# The metric, scale and label of a mix's two panels.
_AGAINST_LOAD = (
    ("good_share", 1.0, "good requests"), ("p99_ttft_ms", 1e-3, "p99 first token, s (log)"),
)  # fmt: skip
_MIXES_A_ROW = 3


def against_load(records: Sequence[Record]) -> str:
    """Plot the share of good requests and p99 TTFT by load: a pair of panels per mix, a line per
    arm, medians over seeds. The first arm of each mix is the tuned one."""
    mixes = ordered(mix_of(record) for record in records)
    arms = ordered(_arm_of(record, records) for record in records)
    palette = colors(arms)
    num_rows = -(-len(mixes) // _MIXES_A_ROW)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2 * num_rows, _MIXES_A_ROW, figsize=(9, 4 * num_rows + 0.6), layout="constrained",
            squeeze=False, sharex=True,
        )  # fmt: skip
        for axis in axes.flat:
            axis.set_visible(False)
        for number, mix in enumerate(mixes):
            row, column = divmod(number, _MIXES_A_ROW)
            here = [record for record in records if mix_of(record) == mix]
            for axis, shown in zip(axes[2 * row : 2 * row + 2, column], _AGAINST_LOAD, strict=True):
                axis.set_visible(True)
                for arm, color in palette.items():
                    of_arm = [record for record in here if _arm_of(record, here) == arm]
                    _line(axis, of_arm, shown[0], shown[1], color=color, label=arm)
                axis.set_ylabel(shown[2] if column == 0 else "", fontsize=9)
            axes[2 * row, column].set_title(mix, fontsize=10)
            axes[2 * row + 1, column].set_yscale("log")
            _plain_ticks(axes[2 * row + 1, column].yaxis)
            axes[2 * row + 1, column].minorticks_off()
            axes[2 * row + 1, column].set_xlabel("times capacity, tuned", fontsize=9)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=4, fontsize=8, loc="outside upper center")
        return svg_text(figure)


def headline(records: Sequence[Record], mix: str) -> str:
    """Plot the share of good requests of one mix by requests per second: SGLang's default policy,
    the tuned one, which is the mix's first arm, and sage.

    Medians over seeds. The picture is to be read at 400 px, on white and on black.
    """
    here = [record for record in records if mix_of(record) == mix]
    shown = (
        ("fcfs", "SGLang", "#7d8590"), (here[0].arm, "SGLang, tuned", "#3b82f6"),
        ("sage", "sage", "#e5484d"),
    )  # fmt: skip
    gray = "#7d8590"
    with plt.rc_context(STYLE | dict.fromkeys(_TEXT_AND_LINES, gray) | {"font.size": 11}):
        figure, axis = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
        figure.patch.set_alpha(0)
        axis.patch.set_alpha(0)
        axis.axhline(95, color=gray, lw=0.8, ls=":")
        for arm, label, color in shown:
            of_arm = [record for record in here if record.arm == arm]
            _line(axis, of_arm, "good_share", 100, along="offered_rate", color=color, label=label)
            axis.lines[-1].set(lw=2.2, marker="o", ms=3)
        axis.set_ylim(0, 103)
        axis.set_xlim(left=0)
        axis.set_xlabel("requests per second")
        axis.set_ylabel("requests in time, %")
        axis.legend(loc="lower left", labelcolor="linecolor")
        return svg_text(figure)


def _arm_of(record: Record, records: Sequence[Record]) -> str:
    """Return an arm's name. The tuned arm, the first of its mix, is a different policy in each
    mix."""
    first = next(each for each in records if mix_of(each) == mix_of(record))
    return "SGLang, tuned" if record.arm == first.arm else record.arm


def _line(
    axis: Any, records: Sequence[Record], metric: str, scale: float, along: str = "", **style: Any
) -> None:
    """Draw medians by load, or by the metric `along`."""
    loads = sorted({multiple_of(record) for record in records})
    of_load = [[r.metrics for r in records if multiple_of(r) == x] for x in loads]
    x = [float(np.median([m[along] for m in found])) for found in of_load] if along else loads
    y = [float(np.median([m[metric] * scale for m in found])) for found in of_load]
    axis.plot(x, y, lw=1.2, **style)


def _spread(values: Sequence[float]) -> tuple[float, list[list[float]]]:
    """Return the median, and the distances of the smallest and largest value, as matplotlib takes
    them."""
    median = float(np.median(values))
    return median, [[median - min(values)], [max(values) - median]]


def _plain_ticks(axis: Any) -> None:
    """Set plain numbers at 1, 2 and 5 of each decade of a log scale."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def svg_text(figure: Any) -> str:
    """Return a matplotlib figure as text, the same each time it is drawn, and close the figure."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
