"""The evaluation as Markdown tables, and as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.comparison.stats import with_interval
from bench.paper.cases import Case, Figure
from bench.paper.runs import Outcome

Outcomes = Mapping[tuple[Case, int], Outcome]


def values(outcomes: Outcomes, case: Case, field: str) -> Any:
    """A field of all seeds' outcomes, in the order of seeds; shape (seeds,)."""
    seeds = sorted(seed for known, seed in outcomes if known == case)
    return np.array([outcomes[case, seed][field] for seed in seeds])


def cell(outcomes: Outcomes, case: Case, reference: Case, field: str) -> str:
    """Median over seeds, and its ratio to the reference's, paired by seed, with its interval."""
    mine, theirs = values(outcomes, case, field), values(outcomes, reference, field)
    return f"{np.median(mine):.2f} · {with_interval((mine / theirs).tolist())}"


def markdown(figure: Figure, outcomes: Outcomes) -> str:
    """Mean TTLT with its ratio to the first row, a column each, then p99, TTFT and what the figure
    names besides; and medians of what it names without a ratio."""
    lines = [f"### {heading(figure)}", "", f"The paper: {figure.claim}.", ""]
    for label, field in (
        ("mean TTLT", "mean_ttlt_s"), ("p99 TTLT", "p99_ttlt_s"), ("mean TTFT", "mean_ttft_s"),
        *figure.of_ratio,
    ):  # fmt: skip
        head = [f"{label}, s · ratio to {figure.rows[0][0]}", *figure.columns]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for name, cases in figure.rows:
            cells = [
                cell(outcomes, case, reference, field)
                for case, reference in zip(cases, figure.rows[0][1], strict=True)
            ]
            lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
        lines.append("")
    for label, field in figure.also:
        lines += ["| " + " | ".join([label, *figure.columns]) + " |"]
        lines += ["|---" * (1 + len(figure.columns)) + "|"]
        for name, cases in figure.rows:
            medians = [_short(np.median(values(outcomes, case, field))) for case in cases]
            lines.append("| " + " | ".join([f"`{name}`", *medians]) + " |")
        lines.append("")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{round(float(value), 0 if abs(value) >= 10 else 1):g}"


def heading(figure: Figure) -> str:
    kind = "Fig." if figure.name[0].isdigit() else "Ours,"
    return f"{kind} {figure.name}: {figure.title}"


def numbers(figures: Sequence[Figure], outcomes: Outcomes) -> list[dict[str, Any]]:
    """For a program: medians over seeds, a row for each cell of each figure."""
    return [
        {"figure": figure.name, "row": name, "column": column}
        | {field: float(np.median(values(outcomes, case, field))) for field in outcomes[case, 0]}
        for figure in figures
        for name, cases in figure.rows
        for column, case in zip(figure.columns, cases, strict=True)
    ]
