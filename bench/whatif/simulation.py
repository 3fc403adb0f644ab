"""Simulates an operator's log under other policies."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NoReturn

from tqdm import tqdm

from bench.policies.rival import Rival
from bench.simulator.pool import OutOfMemoryError
from bench.simulator.presets import Engine
from bench.simulator.radix_tree import Span, cut
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.whatif.log import BLOCK_CHARS, Logged
from bench.whatif.predictions import Forecasts, Predictions
from bench.whatif.sessions import Link
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names

# The first requests of a log, by which the time of all simulations is estimated.
_NUM_TRIED = 200
# Streams of unshared tokens; a block's number is its stream.
_FIRST_OWN_STREAM = -(1 << 60)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a policy, one for each variant of the predictions; a single one if it uses
    none.

    usual: as in Predictions.
    ended_s: when the scheduler ended because KV memory ran out, as SGLang's does; None if it served
        the whole log. If it ended, there are no results.
    """

    policy: str
    results: tuple[Result, ...]
    usual: int
    ended_s: float | None = None


def most_tokens(engine: Engine, request: Logged) -> int:
    """Return the longest answer that a request may have if it is alone on the engine."""
    return engine.kv_pool_tokens - engine.page_size - request.input_tokens - 1


def requests_of(
    engine: Engine, requests: Sequence[Logged], links: Sequence[Link], cap_tokens: int | None
) -> list[SimRequest]:
    """Return requests for the simulator, without predictions; each fits the engine.

    cap_tokens: for requests whose cap the log does not give; None: the rest of the context.
    """
    found = []
    for request, prompt, link in zip(requests, spans_of(requests), links, strict=True):
        most = most_tokens(engine, request)
        cap = (cap_tokens if request.cap_tokens is None else request.cap_tokens) or most
        found.append(
            SimRequest(
                arrival_s=request.arrival_s,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                max_new_tokens=min(max(cap, request.output_tokens), most),
                distribution=None,
                class_name="log",
                spans=prompt,
                follows=link.follows,
                pause_s=link.pause_s,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good if its TTFT and its mean time per further token are within these limits."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0

    def good_share(self, result: Result) -> float:
        return result.good_share(self.ttft_ms / 1e3, self.tpot_ms / 1e3)


@dataclass(frozen=True, slots=True)
class Simulations:
    """Simulations of a log under several policies. Their bar counts served requests."""

    engine: Engine
    policies: Sequence[str]
    predictions: Predictions
    config: SageConfig

    def bar(
        self, requests: Sequence[SimRequest], *, num_tables: int, num_multiples: int
    ) -> tqdm[NoReturn]:
        """Run a small simulation to estimate and print the time of all, and return a bar that
        counts the requests they serve."""
        few, said = requests[:_NUM_TRIED], self.predictions.variants
        usual = replace(self.predictions, variants=(said[0][:_NUM_TRIED],), usual=1)
        started_s = time.perf_counter()
        replace(self, predictions=usual).outcomes(few, tqdm(disable=True))
        each_s = (time.perf_counter() - started_s) / (len(few) * len(self.policies))
        num_variants = sum(len(said) if predicts(name) else 1 for name in self.policies)
        num_runs = num_tables * num_variants + num_multiples * len(self.policies)
        total = num_runs * len(requests)
        about = f"{len(requests)} requests {num_runs} times: takes about {each_s * total:.0f} s"
        print(f"simulating {about}, longer if many wait", file=sys.stderr, flush=True)
        return tqdm(total=total, desc="simulating", unit="request", mininterval=1)

    def outcomes(self, requests: Sequence[SimRequest], bar: tqdm[NoReturn]) -> list[Outcome]:
        """Return each policy's outcome. Raises ValueError for an unknown policy."""
        found, predictions = [], self.predictions
        options = Options(preempt=self.config.preemption.enabled)
        for policy in self.policies:
            bar.set_postfix_str(policy)
            variants = predictions.variants if predicts(policy) else predictions.variants[:1]
            try:
                results = tuple(
                    simulate(
                        self.engine, policy, self.config, _with(requests, said), options, bar.update
                    )
                    for said in variants
                )
            except OutOfMemoryError as error:
                found.append(Outcome(policy, (), 0, error.at_s))
            else:
                found.append(Outcome(policy, results, min(predictions.usual, len(results))))
        return found

    def shares_good(
        self,
        as_logged: Sequence[Outcome],
        requests: Sequence[SimRequest],
        multiples: Sequence[float],
        slo: Slo,
        bar: tqdm[NoReturn],
    ) -> dict[str, list[float]]:
        """Return, by policy, the share of good requests at each multiple of the log's rate; 0 if
        the policy's scheduler ends at that rate.

        as_logged: the outcomes at the log's own rate.
        """
        usual = replace(self.predictions, variants=self.predictions.variants[:1], usual=1)
        found: dict[str, list[float]] = {policy: [] for policy in self.policies}
        for multiple in multiples:
            served = as_logged
            if multiple != 1:
                sooner = [replace(one, arrival_s=one.arrival_s / multiple) for one in requests]
                served = replace(self, predictions=usual).outcomes(sooner, bar)
            for outcome in served:
                share = 0.0 if outcome.ended_s is not None else slo.good_share(outcome.results[0])
                found[outcome.policy].append(share)
        return found


def predicts(policy: str) -> bool:
    """Return whether a policy uses predictions."""
    return Rival.parse(policy).policy in policy_names()


def _with(requests: Sequence[SimRequest], said: Forecasts) -> list[SimRequest]:
    """Return the requests with their predictions, cut at their caps as a server cuts them."""
    return [
        replace(each, distribution=None if found is None else found.capped(each.max_new_tokens))
        for each, found in zip(requests, said, strict=True)
    ]


def spans_of(requests: Sequence[Logged]) -> list[tuple[Span, ...]]:
    """Return the prompts for the simulator; () for a prompt that shares nothing. Only repeated
    blocks are distinct, because the simulator spends time on each."""
    counts = Counter(block for request in requests for block in request.blocks)
    text_tokens = _tokens_of_text_block(requests)
    spans: list[tuple[Span, ...]] = []
    for number, request in enumerate(requests):
        shared = list(takewhile(lambda block: counts[block] > 1, request.blocks))
        size = request.block_tokens or text_tokens
        # As in a server, at least the last token of a prompt is computed.
        found = cut([(block, 0, size) for block in shared], request.input_tokens - 1)
        rest = request.input_tokens - sum(end - first for _, first, end in found)
        own = (_FIRST_OWN_STREAM + number, 0, rest)
        spans.append((*found, own) if found else ())
    return spans


def _tokens_of_text_block(requests: Sequence[Logged]) -> int:
    """Return the tokens of a block of text, one number for the whole log; otherwise equal prompts
    would be cut differently."""
    known = [request for request in requests if request.blocks and not request.block_tokens]
    num_chars = sum(request.prompt_chars for request in known)
    num_tokens = sum(request.input_tokens for request in known)
    return max(1, round(BLOCK_CHARS * num_tokens / num_chars)) if num_chars else 1
