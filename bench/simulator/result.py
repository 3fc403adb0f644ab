"""Computes the figures of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.run_metrics import fairness_metrics, run_metrics
from sage_sched.gaps import percentile_s
from sage_sched.job import Hints
from sage_sched.plan import PreemptionMode
from sage_sched.slo import Attainment
from sage_sched.steps import attended_pairs

_BOTH = (True, False)
# A reader notices a longer gap between two tokens.
_LONG_GAP_S = 5.0
_QUANTILES = (("median", 50), ("p90", 90), ("p99", 99))


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A client's figures per request, in the order of the run's requests. Arrays have shape
    (requests,).

    ttft_s, ttlt_s: from its arrival to its first and last token.
    alone_s: to its last token on an idle engine.
    input_tokens, answer_tokens: its true lengths.
    num_next_on_time: its tokens after the first that were on time.
    hints: the client's.
    class_names: its kind, for reports.
    longest_gap_s: between two tokens of its answer.
    pauses_s: when its gaps of PAUSE_S or more began and ended.
    gaps: how often each gap came, over all answers, in 1/GAPS_PER_S; empty if not counted.
    duration_s: from the first arrival to the last token.
    cached_tokens: tokens of all prompts found in the cache; None if not counted.
    num_refused: requests that were refused, which are left out; None if not counted.
    """

    arrival_s: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    ttlt_s: NDArray[np.float64]
    alone_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    answer_tokens: NDArray[np.int64]
    num_next_on_time: NDArray[np.int64]
    hints: tuple[Hints, ...]
    class_names: NDArray[np.str_]
    longest_gap_s: NDArray[np.float64]
    pauses_s: tuple[tuple[tuple[float, float], ...], ...]
    gaps: Counter[int]
    duration_s: float
    cached_tokens: int | None
    num_refused: int | None

    @classmethod
    def of(
        cls,
        alone_s: Callable[[int, int], float],
        requests: Sequence[SimRequest],
        arrival_s: NDArray[np.float64],
        first_s: NDArray[np.float64],
        last_s: NDArray[np.float64],
        **more: Any,
    ) -> Self:
        """Compute the figures from the times of requests, and of their first and last tokens.

        alone_s: the time of a request with these input and output tokens on an idle engine.
        more: the other fields.
        """
        return cls(
            arrival_s=arrival_s,
            ttft_s=first_s - arrival_s,
            ttlt_s=last_s - arrival_s,
            alone_s=np.array([alone_s(r.input_tokens, r.output_tokens) for r in requests]),
            input_tokens=np.array([request.input_tokens for request in requests]),
            answer_tokens=np.array([request.output_tokens for request in requests]),
            hints=tuple(request.hints for request in requests),
            class_names=np.array([request.class_name for request in requests]),
            duration_s=float(last_s.max() - arrival_s.min()),
            **more,
        )

    def metrics(self) -> dict[str, float]:
        """Return the run's metrics, by the names of SGLang's bench_serving if it has one."""
        numbers: dict[str, float] = {}
        for name, of_s in (("e2e_latency", self.ttlt_s), ("ttft", self.ttft_s)):
            numbers[f"mean_{name}_ms"] = 1e3 * float(of_s.mean())
            for quantile, percent in _QUANTILES:
                numbers[f"{quantile}_{name}_ms"] = 1e3 * float(np.percentile(of_s, percent))
        first_s, last_s = self.arrival_s + self.ttft_s, self.arrival_s + self.ttlt_s
        later = np.maximum(self.answer_tokens - 1, 1)
        output_tokens = int(self.answer_tokens.sum())
        waited_ms = 1e3 * (self.ttlt_s - self.alone_s) / self.answer_tokens
        numbers |= {
            **run_metrics(self.arrival_s, first_s, last_s, self.answer_tokens, self.alone_s),
            **fairness_metrics(
                self.arrival_s, last_s, self.alone_s, self.input_tokens, self.answer_tokens
            ),
            "mean_tpot_ms": 1e3 * float(((last_s - first_s) / later).mean()),
            "mean_waited_per_token_ms": float(waited_ms.mean()),
            "p99_waited_per_token_ms": float(np.percentile(waited_ms, 99)),
            "output_throughput": output_tokens / self.duration_s,
            "total_throughput": (output_tokens + int(self.input_tokens.sum())) / self.duration_s,
            "request_throughput": len(self.ttlt_s) / self.duration_s,
            "mean_slowdown": float((self.ttlt_s / self.alone_s).mean()),
            "p99_slowdown": float(np.percentile(self.ttlt_s / self.alone_s, 99)),
            "largest_slowdown": float((self.ttlt_s / self.alone_s).max()),
            "duration": self.duration_s,
            "p99_longest_gap_ms": 1e3 * float(np.percentile(self.longest_gap_s, 99)),
            "max_itl_ms": 1e3 * float(self.longest_gap_s.max()),
            "paused_share": float((self.longest_gap_s > _LONG_GAP_S).mean()),
        }
        if self.gaps:
            numbers["p99_itl_ms"] = 1e3 * percentile_s(self.gaps, 99)
            numbers["p999_itl_ms"] = 1e3 * percentile_s(self.gaps, 99.9)
        if self.cached_tokens is not None:
            numbers["cached_share"] = self.cached_tokens / float(self.input_tokens.sum())
        if self.num_refused is not None:
            numbers["refused_share"] = self.num_refused / (self.num_refused + len(self.ttlt_s))
        return numbers

    def session_metrics(self) -> dict[str, float]:
        """Return the metrics of sessions, without the pauses between their steps; none if there
        are none."""
        spent_s: dict[str, float] = defaultdict(float)
        for hints, seconds in zip(self.hints, self.ttlt_s.tolist(), strict=True):
            if hints.session:
                spent_s[hints.session] += seconds
        sessions_ms = 1e3 * np.array([*spent_s.values()])
        if not sessions_ms.size:
            return {}
        return {
            "mean_session_ms": float(sessions_ms.mean()),
            "p99_session_ms": float(np.percentile(sessions_ms, 99)),
        }

    def good_share(self, ttft_s: float, tpot_s: float) -> float:
        """Return the share of requests whose TTFT and mean time per further token are within these
        limits."""
        later = np.maximum(self.answer_tokens - 1, 1)
        in_time = (self.ttlt_s - self.ttft_s) / later <= tpot_s
        return float((in_time & (self.ttft_s <= ttft_s)).mean())

    def on_time_share(self, ttft_s: float) -> float:
        """Return the share of tokens on time: first tokens within ttft_s, others by
        num_next_on_time."""
        num_on_time = int((self.ttft_s <= ttft_s).sum()) + int(self.num_next_on_time.sum())
        return num_on_time / int(self.answer_tokens.sum())

    def only(self, class_names: Collection[str]) -> Served:
        """Return the requests of these classes, at least one."""
        return self._of(np.isin(self.class_names, list(class_names)))

    def arrived_within(self, first: float, last: float) -> Served:
        """Return the requests between two shares of all arrivals, such as 0.2 and 0.8."""
        places = np.argsort(np.argsort(self.arrival_s, kind="stable")) / len(self.arrival_s)
        return self._of((first <= places) & (places < last))

    def arrived_after(self, seconds: float) -> Served:
        """Return the requests that came after a time, with all refused ones."""
        return replace(self._of(self.arrival_s >= seconds), num_refused=self.num_refused)

    def _of(self, chosen: NDArray[np.bool_]) -> Served:
        arrays = {
            field.name: getattr(self, field.name)[chosen]
            for field in fields(Served)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        places = np.flatnonzero(chosen)
        hints = tuple(self.hints[place] for place in places)
        pauses_s = tuple(self.pauses_s[place] for place in places)
        last_s = arrays["arrival_s"] + arrays["ttlt_s"]
        duration_s = float(last_s.max() - arrays["arrival_s"].min())
        uncounted: dict[str, Any] = {
            "cached_tokens": None,
            "num_refused": None,
            "gaps": Counter(),
        }
        return Served(**arrays, hints=hints, pauses_s=pauses_s, duration_s=duration_s, **uncounted)

    def attainment(self) -> dict[str, Any]:
        """Return how many requests met their deadlines."""
        attainment = Attainment()
        for hints, *served in zip(
            self.hints,
            self.ttft_s.tolist(),
            self.ttlt_s.tolist(),
            self.answer_tokens.tolist(),
            self.num_next_on_time.tolist(),
            strict=True,
        ):
            attainment.add(hints, *served)
        return attainment.metrics(self.duration_s)


@dataclass(frozen=True, slots=True, eq=False)
class Result(Served):
    """A run's figures, including the engine's.

    num_retractions: how often a request lost its KV.
    num_preemptions: how often a request was preempted.
    preemptions: the preemptions of all requests, by whether memory ran out (else they were for a
        waiting request), and by mode.
    prefill_tokens: computed tokens, including recomputed ones.
    moved_tokens: swapped tokens, both ways.
    peak_host_tokens: the most KV of swapped-out requests at a time; for several engines, the sum.

    All are the same for the same input, bit for bit.
    """

    num_retractions: NDArray[np.int64]
    num_preemptions: NDArray[np.int64]
    preemptions: Counter[tuple[bool, PreemptionMode]]
    prefill_tokens: int
    moved_tokens: int
    peak_host_tokens: int

    def metrics(self) -> dict[str, float]:
        """Return the metrics, including the engine's."""
        return {
            **Served.metrics(self),
            "num_retractions": float(self.num_retractions.sum()),
            "num_yields": float(self.num_preemptions.sum()),
            "num_out_of_memory": float(sum(self.preemptions[True, way] for way in PreemptionMode)),
            "num_left_in_tree": float(
                sum(self.preemptions[short, PreemptionMode.RECOMPUTE] for short in _BOTH)
            ),
            "simulated_tokens": float(int(self.answer_tokens.sum()) + self.prefill_tokens),
            "moved_tokens": float(self.moved_tokens),
            "peak_host_tokens": float(self.peak_host_tokens),
        }


def alone_s(engine: Engine, input_tokens: int, output_tokens: int) -> float:
    """Return the time to the last token of a request on an idle engine."""
    step_time, chunk = engine.step_time, engine.chunked_prefill_size
    seconds = 0.0
    for done in range(0, input_tokens, chunk):
        new = min(chunk, input_tokens - done)
        seconds += step_time.prefill_s(1, new, attended_pairs(done, new))
    steps = output_tokens - 1
    kv_token_steps = steps * (input_tokens + 1) + steps * (steps - 1) // 2
    seconds += steps * step_time.decode_s(1, 0)
    return seconds + kv_token_steps * step_time.decode_kv_token_s
