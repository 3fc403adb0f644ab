"""Requests of many kinds. A request's number sets its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.managers.io_struct import SessionParams

from patches.carrier import DRY_RUN, session_of
from sage_sched.job import Hints
from tests.patches.recorded.asks import Ask, Make


def crowd(
    number: int, vary: Callable[[int], Mapping[str, Any]] = lambda n: {}, *, every: int = 2
) -> list[tuple[int, Make]]:
    """Requests of many lengths, one every `every` turns. A ninth of them have no prediction, a
    fifth a wrong one. vary: other fields of the n-th Ask."""
    asks = []
    for n in range(number):
        answer_tokens = 2 + n * n % 47
        expected = 60 - answer_tokens if n % 5 == 4 else answer_tokens
        lengths = [] if n % 9 == 8 else [1 + expected // 2, expected, 1 + 2 * expected]
        ask = Ask(n, 10 + 37 * n % 90, answer_tokens, lengths, n % 3, 8)
        asks.append((1 + every * n, replace(ask, **vary(n))))
    return asks


def sampling(n: int) -> Mapping[str, Any]:
    """Return sampling that a swap must keep, or that rules preemption out."""
    return {
        "sampling": (
            {}, {"frequency_penalty": 0.5}, {"ignore_eos": True, "max_new_tokens": 9 + n % 20},
            {"presence_penalty": 0.25}, {"logit_bias": {"9": 1.0}}, {"max_new_tokens": 0},
        )[n % 6]
    }  # fmt: skip


def of_classes(n: int) -> Mapping[str, Any]:
    name, weight, ttft_ms = (("high", 4.0, 300.0), ("low", 1.0, 900.0), ("", 1.0, None))[n % 3]
    return {
        "hints": Hints(
            weight=weight, ttft_slo_ms=ttft_ms, tpot_slo_ms=ttft_ms and 60.0, slo_class=name,
            urgency=1 + n % 5, tenant=str(n * n % 4), shares_fairly=n % 2 == 0,
        ),
        "others": {"priority": None if n % 7 == 0 else -(2**63) if n % 9 == 0 else 12 * (n % 4)},
    }  # fmt: skip


def adapted(n: int) -> Mapping[str, Any]:
    """Requests of four adapters."""
    return {"others": {"lora_id": f"a{n % 5}"}}


def alike(n: int) -> Mapping[str, Any]:
    return {"prompt_tokens": 60, "shared_tokens": 48}


def conversation(n: int) -> Mapping[str, Any]:
    """Return conversations, each half as lively as the one before. Each turn's prompt begins with
    the previous prompt."""
    session = (~n & n + 1).bit_length()
    turn = min(n >> session, 12)
    return {
        "family": 100 + session, "shared_tokens": 12 + 9 * turn, "prompt_tokens": 21 + 9 * turn,
        "answer_tokens": 3 + n % 11,
        "hints": Hints(session=f"s{session}", pause_ms=50.0 * session, ends_session=turn == 12),
    }  # fmt: skip


def dry_now_and_then(n: int) -> Mapping[str, Any]:
    """Return requests, some of which only ask how long they would take."""
    return {"carried": DRY_RUN} if n % 6 == 5 else of_classes(n)


def transferred(n: int) -> Mapping[str, Any]:
    """Requests whose prompts a prefill server has computed."""
    return {
        **dry_now_and_then(n), "answer_tokens": 5 + n * n % 60,
        "others": {
            "bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_room": n, "lora_id": f"a{n % 5}",
        },
    }  # fmt: skip


def with_logprobs(n: int) -> Mapping[str, Any]:
    return {"others": {"return_logprob": n % 5 == 1, "logprob_start_len": 0}}


def streaming(n: int) -> Mapping[str, Any]:
    if n % 3:
        return {}
    own = {"session_id": None, "session_params": SessionParams(id=f"s{n % 2}")}
    return {"others": own, "hints": Hints(session=session_of(f"s{n % 2}"))}


def malformed(n: int) -> Mapping[str, Any]:
    """Return malformed messages, which other programs may send. Some prompts exceed the model's
    context."""
    carried = {3: {"__sage_weights": "x"}, 5: {"__sage_hint_weight": -1.0}}.get(n % 7, {})
    return {
        **sampling(n), "carried": carried, "prompt_tokens": 5000 if n % 13 == 12 else 30 + n % 50
    }  # fmt: skip
