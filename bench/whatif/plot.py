"""Draws the picture of `sage-sched whatif`."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt

from bench.experiment.plot import STYLE, colors, svg_text
from bench.whatif.comparison import Row


def ratios_to_first(rows: Sequence[Row], title: str) -> str:
    """Plot mean TTLT and p99 of each policy as ratios to the first, with their intervals."""
    palette = colors([row.policy for row in rows])
    places = range(len(rows), 0, -1)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, 2, figsize=(10, 1.6 + 0.42 * len(rows)), sharey=True, layout="constrained"
        )
        for axis, name, label in (
            (axes[0], "mean_ratio", "mean time to the last token"),
            (axes[1], "p99_ratio", "p99"),
        ):
            for place, row in zip(places, rows, strict=True):
                ratio = getattr(row, name)
                axis.barh(place, ratio.value, height=0.6, color=palette[row.policy], alpha=0.75)
                axis.plot([ratio.low, ratio.high], [place, place], color="#222", lw=1.2)
                axis.annotate(
                    f" {ratio.value:.2f}", (max(ratio.high, ratio.value), place), va="center"
                )
            axis.axvline(1.0, color="#444", lw=0.8)
            axis.set_xlabel(f"{label}, ratio to {rows[0].policy}")
            axis.margins(x=0.12)
        axes[0].set_yticks(list(places), [row.policy for row in rows])
        figure.suptitle(title, fontsize=9)
        return svg_text(figure)
