"""The report's plots, as SVG text. Each takes the valid runs of a comparison."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import ticker

from bench.experiment.records import Record
from bench.experiment.stats import ordered

Run = Mapping[str, Any]

# As many as the largest comparison has policies, so that no two are alike.
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

# A distribution is drawn in so many steps at most.
_NUM_STEPS = 200


def colors(policies: Sequence[str]) -> dict[str, str]:
    """One colour a policy, the same in every plot; ours stands out."""
    others = [policy for policy in policies if policy != "sage"]
    palette = {policy: _COLORS[i % len(_COLORS)] for i, policy in enumerate(others)}
    return palette | ({"sage": _OURS} if "sage" in policies else {})


def mean_against_tail(records: Sequence[Record]) -> str:
    """Mean TTLT and p99, a mark an arm, a panel a load: medians and ranges over seeds. Both are
    better the smaller they are."""
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


def _spread(values: Sequence[float]) -> tuple[float, list[list[float]]]:
    """The median, and how far the others are below and above it, as matplotlib wants it."""
    median = float(np.median(values))
    return median, [[median - min(values)], [max(values) - median]]


def latency_against_rate(runs: Sequence[Run]) -> str:
    """Mean and p99 TTLT and mean TTFT over the arrival rate, median and range over seeds."""
    panels = (
        ("mean_e2e_latency_ms", "mean TTLT"),
        ("p99_e2e_latency_ms", "p99 TTLT"),
        ("mean_ttft_ms", "mean TTFT"),
    )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.6), layout="constrained")
        for axis, (metric, label) in zip(axes, panels, strict=True):
            _panel_over_rate(axis, runs, metric, label)
        axes[0].legend(fontsize=8)
        return svg_text(figure)


def _panel_over_rate(axis: Any, runs: Sequence[Run], metric: str, label: str) -> None:
    policies = ordered(run["policy"] for run in runs)
    rates = ordered(run["rate"] for run in runs)
    for offset, (policy, color) in enumerate(colors(policies).items()):
        places, middle, below, above = [], [], [], []
        for place, rate in enumerate(rates):
            values = [
                run[metric] / 1e3 for run in runs if (run["policy"], run["rate"]) == (policy, rate)
            ]
            if values:
                median = float(np.median(values))
                # Beside each other, or equal policies would hide one another.
                places.append(place + (offset - len(policies) / 2) * 0.06)
                middle.append(median)
                below.append(median - min(values))
                above.append(max(values) - median)
        axis.errorbar(
            places, middle, [below, above], fmt="o-", color=color, label=policy, capsize=2, lw=1
        )
    seconds = [np.mean([r["request_rate"] for r in runs if r["rate"] == rate]) for rate in rates]
    labels = [f"{rate}\n{rate_s:.2g}/s" for rate, rate_s in zip(rates, seconds, strict=True)]
    axis.set_xticks(range(len(rates)), labels)
    axis.set_xlim(-0.6, len(rates) - 0.4)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("arrival rate, requests/s")
    axis.set_ylabel(f"{label}, s")


def ttlt_distribution(runs: Sequence[Run]) -> str:
    """The share of requests done within a time, a panel a rate."""
    rates = ordered(run["rate"] for run in runs)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(rates), figsize=(5.5 * len(rates), 3.8), layout="constrained", squeeze=False
        )
        for axis, rate in zip(axes[0], rates, strict=True):
            for policy, color in colors(ordered(run["policy"] for run in runs)).items():
                ttlt_s = np.sort(_pooled(runs, policy, rate, "e2e_latency_ms")) / 1e3
                if ttlt_s.size:
                    share = np.linspace(0, 1, min(ttlt_s.size, _NUM_STEPS))
                    reached_s = np.quantile(ttlt_s, share)
                    axis.step(reached_s, share, where="post", color=color, label=policy, lw=1.4)
            axis.set_xscale("log")
            _plain_ticks(axis.xaxis)
            axis.set_xlabel("TTLT, s (log)")
            axis.set_ylabel("share of requests")
            axis.set_title(f"rate {rate}", fontsize=10)
        axes[0][0].legend(fontsize=8)
        return svg_text(figure)


def slowdown_by_length(runs: Sequence[Run]) -> str:
    """Median and p95 slowdown in bins of output length, at the highest rate."""
    rate = max(runs, key=lambda run: float(run["request_rate"]))["rate"]
    edges = np.unique(
        np.quantile(
            np.concatenate([run["requests"]["output_tokens"] for run in runs]),
            np.linspace(0, 1, 9),
        )
    )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
        for axis, (q, label) in zip(axes, ((0.5, "median"), (0.95, "p95")), strict=True):
            for policy, color in colors(ordered(run["policy"] for run in runs)).items():
                lengths = _pooled(runs, policy, rate, "output_tokens")
                slowdowns = _pooled(runs, policy, rate, "slowdown")
                bins = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, edges.size - 2)
                used = np.unique(bins)
                axis.plot(
                    [np.median(lengths[bins == b]) for b in used],
                    [np.quantile(slowdowns[bins == b], q) for b in used],
                    "o-", color=color, label=policy, lw=1.2, ms=4,
                )  # fmt: skip
            axis.set_xscale("log")
            axis.set_yscale("log")
            _plain_ticks(axis.xaxis)
            _plain_ticks(axis.yaxis)
            axis.set_xlabel("output length, tokens (log)")
            axis.set_ylabel(f"{label} slowdown, TTLT / unloaded TTLT (log)")
            axis.set_title(f"rate {rate}", fontsize=10)
        axes[0].legend(fontsize=8)
        return svg_text(figure)


def _plain_ticks(axis: Any) -> None:
    """On a log scale, plain numbers at 1, 2 and 5 of each decade."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _pooled(runs: Sequence[Run], policy: str, rate: str, field: str) -> Any:
    picked = [
        run["requests"][field] for run in runs if (run["policy"], run["rate"]) == (policy, rate)
    ]
    return np.concatenate([np.asarray(values, float) for values in picked] or [np.empty(0)])


def svg_text(figure: Any) -> str:
    """A matplotlib figure, closed by this, the same text each time it is drawn."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
