"""Figures of bench.comparison.layer_cuts, as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from bench.comparison.plots import STYLE, svg_text


def shares_figure(shares: Mapping[float, Sequence[tuple[str, float]]]) -> str:
    """By how many times LS waits less for its first token with each step, a bar a load, log."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
        width = 0.8 / len(shares)
        for number, (load, steps) in enumerate(shares.items()):
            places = np.arange(len(steps)) + (number - (len(shares) - 1) / 2) * width
            bars = axis.bar(places, [gain for _, gain in steps], width, label=f"{load:g} x load")
            axis.bar_label(bars, fmt="%.2g", fontsize=8)
        axis.set_xticks(range(len(steps)), [name for name, _ in steps])
        axis.set_yscale("log")
        axis.axhline(1.0, color="black", lw=0.8)
        axis.set_ylabel("mean LS TTFT, before / after")
        axis.legend(fontsize=8)
        return svg_text(figure)


def frontier_figure(points: Sequence[tuple[int, str, float, float]]) -> str:
    """LS TTFT p99 against BE tokens/s, a panel a length of BE prompts, a mark an arm."""
    sizes = list(dict.fromkeys(tokens for tokens, *_ in points))
    labels = list(dict.fromkeys(label for _, label, *_ in points))
    colors = plt.get_cmap("tab20")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(sizes), figsize=(2.6 * len(sizes), 3.6), layout="constrained"
        )
        for axis, size in zip(np.atleast_1d(axes), sizes, strict=True):
            for tokens, label, p99_s, speed in points:
                if tokens == size:
                    color = colors(labels.index(label))
                    axis.plot(p99_s, speed, "o", color=color, label=label.replace("`", ""))
            axis.set_xscale("log")
            axis.set_title(f"{size:,} tokens", fontsize=9)
            axis.set_xlabel("LS TTFT p99, s")
        np.atleast_1d(axes)[0].set_ylabel("BE tokens/s")
        handles, names = np.atleast_1d(axes)[0].get_legend_handles_labels()
        figure.legend(handles, names, fontsize=7, loc="outside lower center", ncols=4)
        return svg_text(figure)
