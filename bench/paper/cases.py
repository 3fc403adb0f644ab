"""What is simulated: every figure of the paper's evaluation as a list of cases."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from sage_sched.config import SageConfig
from sage_sched.policies.sage import SageParameters

RIVALS = ("fcfs", "fastserve", "ssjf", "ltr", "trail-prompt")
STOCK = ("fcfs", "lpm", "hrrn", "shortest-prefill-first")
EVERYONE = (*STOCK, "fastserve", "ssjf", "ltr", "trail-prompt", "uniboost", "sage-mean", "sage")
# Of clips from 4096 to 256, each with conservativeness from 1 to 0.03, this was the best for stock
# policies on seeds 0 and 1 of the sustained load.
AT_THEIR_BEST = (
    "fcfs", "fcfs@conservativeness=0.3", "fcfs@conservativeness=0.1", "fcfs@clip=256",
    "fcfs-fill",
    "hrrn", "hrrn@conservativeness=0.1", "hrrn@clip=256",
    "shortest-prefill-first", "shortest-prefill-first@conservativeness=0.1",
    "shortest-prefill-first@clip=256",
    "uniboost", "ssjf", "trail-prompt", "sage-order", "sage", "srpt-oracle",
)  # fmt: skip
DATASETS = ("chat", "summarization", "writing")
H800, A40 = "h800-qwen3-32b", "a40-llama-3.1-8b"
RATE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulated run, but for its seed.

    dataset: a class of the workload, or "mixed". predictor: a name of bench.paper.runs.PREDICTORS.
    engine: a preset. change: fields of the engine that differ from it. rate: requests/s, or how
    many times what fcfs sustains (of_capacity). load: one of bench.workloads.arrivals.LOADS.
    heavy_tailed: see bench.workloads.foresight.heavy_tailed. wrong_by: a factor on all predicted
    lengths.
    """

    policy: str
    dataset: str = "mixed"
    engine: str = H800
    change: tuple[tuple[str, float], ...] = ()
    rate: float = RATE
    of_capacity: bool = False
    load: str = "pulse"
    heavy_tailed: bool = False
    predictor: str = "semantic"
    noise: bool = False
    wrong_by: float = 1.0
    preempt: bool = True
    config: SageConfig = field(default_factory=SageConfig)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the paper, or one of ours.

    claim: what the paper says of it. rows: a label and its case for each column, in the order of
    columns; ratios are to the first row. of_ratio: what else is shown with its ratio to the first
    row, also: what without one; each a label and a name of
    bench.engines.simulator.result.Result.metrics.
    is_front: drawn as mean against p99, a panel a column.
    """

    name: str
    title: str
    claim: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Case, ...]], ...]
    of_ratio: tuple[tuple[str, str], ...] = ()
    also: tuple[tuple[str, str], ...] = ()
    is_front: bool = False


def figures() -> list[Figure]:
    """All, in the paper's order, then ours."""
    return [
        _over_rates("7a", "Mixed datasets, Qwen3-32B on H800", H800, (4.0, 6.0, 8.0, 10.0)),
        _over_rates("7b", "Mixed datasets, Llama-3.1-8B on A40", A40, (2.0, 3.0, 4.0, 5.0)),
        Figure(
            "8",
            "Each dataset, H800, 8 requests/s",
            "sage is best on each dataset, by most on summarization",
            DATASETS,
            tuple((p, tuple(Case(policy=p, dataset=d) for d in DATASETS)) for p in EVERYONE),
        ),
        Figure(
            "9",
            "Predictors, under sage",
            "the semantic history is best; input length alone is worse",
            ("mixed", *DATASETS),
            tuple(
                (
                    predictor,
                    tuple(
                        Case(policy="sage", predictor=predictor, dataset=d)
                        for d in ("mixed", *DATASETS)
                    ),
                )
                for predictor in ("semantic", "threshold alone", "input length", "none", "truth")
            ),
        ),
        Figure(
            "10",
            "Costs, under Gittins order",
            "resource-bound is better than output and overall length",
            tuple(REGIMES),
            tuple(
                (name, tuple(replace(case, policy=name) for case in REGIMES.values()))
                for name in ("sage-resource-bound", "sage-output", "sage-overall", "sage-measured")
            ),
        ),
        Figure(
            "11",
            "Order rules, with and without noise in the predictions",
            "mean is worse than Gittins, refreshing helps, Gittins suffers less from noise",
            ("exact", "noise"),
            tuple(
                (
                    name,
                    tuple(Case(policy=p, noise=noise, config=config) for noise in (False, True)),
                )
                for name, p, config in (
                    ("sage", "sage", SageConfig()),
                    ("sage-norefresh", "sage-norefresh", SageConfig()),
                    ("sage-mean", "sage-mean", SageConfig()),
                )
            ),
        ),
        Figure(
            "13a",
            "Similarity threshold",
            "0.8 is best",
            ("mixed",),
            tuple(
                (f"{t:g}", (Case(policy="sage", predictor=f"threshold {t:g}"),))
                for t in (0.8, 0.5, 0.6, 0.7, 0.9)
            ),
        ),
        Figure(
            "A",
            "All policies by regime",
            "not in the paper: what binds decides which cost is right",
            tuple(REGIMES),
            tuple(
                (p, tuple(replace(case, policy=p) for case in REGIMES.values()))
                for p in (*EVERYONE, "srpt-oracle")
            ),
        ),
        Figure(
            "B",
            "Order alone, without preemption",
            "not in the paper: what a server does until running requests can yield",
            tuple(REGIMES),
            tuple(
                (p, tuple(replace(case, policy=p, preempt=False) for case in REGIMES.values()))
                for p in (*STOCK, "ssjf", "sage", "srpt-oracle")
            ),
        ),
        Figure(
            "E",
            "What preempting gains, by the speed of the swap and in bursts",
            "not in the paper: it must never make the mean worse than order alone",
            tuple(SWAPS),
            tuple(
                (p, tuple(replace(case, policy=p) for case in SWAPS.values()))
                for p in ("sage-order", "sage", "sage-resource-bound")
            ),
        ),
        Figure(
            "F",
            "When memory runs out, under sage: KV to host memory, or retracted and computed again",
            "not in the paper: its engine retracts as stock engines do",
            tuple(REGIMES),
            tuple(
                (
                    label,
                    tuple(
                        replace(case, policy="sage", preempt=preempt) for case in REGIMES.values()
                    ),
                )
                for label, preempt in (("host memory", True), ("computed again", False))
            ),
            also=(
                ("output tokens/s", "output_throughput"),
                ("retractions", "num_retractions"),
                ("yields", "num_yields"),
                ("longest gap between two tokens, s", "longest_gap_s"),
                ("p99 inter-token latency, s", "p99_itl_s"),
            ),
        ),
        Figure(
            "G",
            "Sustained load, stock policies at their best; H800, of what fcfs sustains",
            "not in the paper: 300 requests in half a minute, stock policies as they come",
            tuple(SUSTAINED),
            tuple(
                (name, tuple(replace(case, policy=name) for case in SUSTAINED.values()))
                for name in AT_THEIR_BEST
            ),
            of_ratio=(("mean time waited", "mean_waited_s"), ("p99 time waited", "p99_waited_s")),
            also=(
                ("output tokens/s while requests come", "arriving_throughput"),
                ("length of the arrivals, in mean TTLTs", "arrivals_per_ttlt"),
                ("drain, s", "drain_s"),
                ("retractions", "num_retractions"),
                ("yields", "num_yields"),
            ),
        ),
        Figure(
            "H",
            "Wrong forecasts, under sage, 8 requests/s",
            "not in the paper: on the first day a predictor may be wrong, all in one direction too",
            tuple(FORECASTS),
            tuple(
                (p, tuple(replace(case, policy=p) for case in FORECASTS.values()))
                for p in ("fcfs-fill", "sage")
            ),
            also=(("output tokens/s", "output_throughput"), ("retractions", "num_retractions")),
        ),
        Figure(
            "I",
            "The front: mean against tail and overtaking, and fairness; sustained load",
            "not in the paper: its order bounds no wait",
            tuple(FRONT),
            tuple(
                (name, tuple(replace(case, policy=p, config=c) for case in FRONT.values()))
                for name, p, c in _front_rows()
            ),
            also=(
                ("largest overtaking", "largest_overtaking"),
                ("Jain's index of slowdowns, %", "jain_percent"),
                ("mean slowdown, shortest third of the answers", "slowdown_short_answers"),
                ("the same, longest third", "slowdown_long_answers"),
                ("mean slowdown, shortest third of the prompts", "slowdown_short_prompts"),
                ("the same, longest third", "slowdown_long_prompts"),
                ("yields", "num_yields"),
            ),
            is_front=True,
        ),
    ]


def _front_rows() -> list[tuple[str, str, SageConfig]]:
    """A label, a policy and its configuration: rivals tuned, and sage at each strength."""
    rivals = (
        "fcfs", "fcfs@conservativeness=0.1", "fcfs-fill",
        "shortest-prefill-first@conservativeness=0.1", "ssjf", "trail-prompt", "srpt-oracle",
    )  # fmt: skip
    return [
        *((name, name, SageConfig()) for name in rivals),
        *((name, name, SageConfig()) for name in ("sage-order", "sage")),
        *((f"sage, regret {r:g}", "sage", _sage(regret=r)) for r in (0.5, 1.0, 2.0, 4.0, math.inf)),
    ]


def _over_rates(name: str, title: str, engine: str, rates: tuple[float, ...]) -> Figure:
    return Figure(
        name,
        title,
        "sage is 28.7 % below the second best, TRAIL, at 8 requests/s on the H800; "
        "best TTFT but for FastServe",
        tuple(f"{rate:g}/s" for rate in rates),
        tuple(
            (label, tuple(Case(policy=p, engine=engine, rate=rate, config=c) for rate in rates))
            for label, p, c in ((p, p, SageConfig()) for p in (*EVERYONE, "srpt-oracle"))
        ),
    )


def _sage(**fields: float) -> SageConfig:
    return SageConfig(policy={"sage": SageParameters(**fields)})  # type: ignore[arg-type]


# What binds: the KV pool, as it is; the slots; prefill (long prompts, short answers); nothing.
REGIMES = {
    "KV-bound": Case(policy=""),
    "slot-bound": Case(policy="", change=(("max_running_requests", 24),), rate=4.0),
    "prefill-bound": Case(policy="", dataset="long prompts", rate=7.0),
    "light": Case(policy="", rate=1.0),
}

FORECASTS = {
    "5 times too short": Case(policy="", wrong_by=0.2),
    "right": Case(policy=""),
    "5 times too long": Case(policy="", wrong_by=5.0),
    "noise": Case(policy="", noise=True),
}

# What a token's KV costs to move; the preset's takes 5 us. And four times as
# much variation between arrivals as Poisson's.
SWAPS = {
    f"{token_us:g} us a token": Case(policy="", change=(("swap_token_s", token_us * 1e-6),))
    for token_us in (1.0, 10.0, 100.0, 1000.0)
} | {
    "bursts": Case(policy="", load="bursts"),
    "bursts, light": Case(policy="", rate=2.0, load="bursts"),
}

# By what binds, where more comes than is served; bursts; tails that no prompt tells; and little.
_SLOTS = (("max_running_requests", 48),)
_OVERLOAD = Case(policy="", rate=1.3, of_capacity=True, load="sustained")
FRONT = {
    "KV-bound": replace(_OVERLOAD, rate=2.0),
    "slot-bound": replace(_OVERLOAD, change=_SLOTS),
    "prefill-bound": replace(_OVERLOAD, dataset="long prompts"),
    "bursts": replace(_OVERLOAD, rate=1.5, load="bursts"),
    "heavy tails, KV": replace(_OVERLOAD, rate=2.0, heavy_tailed=True),
    "heavy tails, slots": replace(_OVERLOAD, change=_SLOTS, heavy_tailed=True),
    "light": replace(_OVERLOAD, rate=0.5),
}

SUSTAINED = {
    f"{share:g}x": Case(policy="", rate=share, of_capacity=True, load="sustained")
    for share in (1.0, 1.3, 1.5, 2.0)
} | {"1.5x, in bursts": Case(policy="", rate=1.5, of_capacity=True, load="bursts")}
