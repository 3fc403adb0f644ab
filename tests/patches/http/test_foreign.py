"""Hints as others write them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.carrier import decode
from patches.http.foreign import AGENT_HINTS, CLASS_HEADERS, HEADERS, slo_class, told
from patches.http.predict import RequestPrediction, attach
from predictor_store.service.client import Prediction
from sage_sched.distribution import LengthDistribution
from sage_sched.job import CLIENTS_HINTS

PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text(encoding="utf-8")
SAID = {"x-llm-d-slo-ttft-ms": "250", "x-smg-tenant-id": "a", "x-dynamo-request-priority": "-3"}
BODY = {"nvext": {"agent_hints": {"osl": 40, "priority": 5, "latency_sensitivity": 1.0}}}


def test_headers_and_the_body_count_as_far_as_they_are_trusted() -> None:
    by_header = {"ttft_slo_ms": 250.0, "tenant": "a", "priority": -3}
    assert told("none", SAID, BODY) == {}
    assert told("header", SAID, BODY) == by_header
    assert told("body", SAID, BODY) == {**by_header, "expected_tokens": 40}
    assert told("body", {}, BODY) == {"priority": 5, "expected_tokens": 40}


def test_a_gateway_knows_the_tenant_and_dynamo_the_session_better() -> None:
    headers = dict.fromkeys(HEADERS, "1") | {"x-dynamo-session-id": "s", "x-smg-tenant-id": "t"}
    found = told("header", headers, None)
    assert (found["session"], found["tenant"]) == ("s", "t")
    assert slo_class({name: name for name in CLASS_HEADERS}) == "x-smg-priority"
    assert slo_class({}) is None


@pytest.mark.parametrize(
    ("headers", "hints", "named"),
    [
        ({"x-llm-d-slo-tpot-ms": "soon"}, {}, "x-llm-d-slo-tpot-ms"),
        ({"x-dynamo-request-priority": "1.5"}, {}, "x-dynamo-request-priority"),
        ({}, {"osl": "many"}, "many"),
        ({}, {"osl": 0}, "osl"),
        ({}, {"osl": 2**31}, "osl"),
        ({}, {"priority": True}, "True"),
        ({}, {"priority": 2**63}, f"{2**63}"),
        ({"x-dynamo-request-priority": f"{-(2**63) - 1}"}, {}, f"{-(2**63) - 1}"),
    ],
)
def test_what_cannot_be_read_is_the_clients_error(
    headers: dict[str, str], hints: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        told("body", headers, {"nvext": {"agent_hints": hints}})


@pytest.mark.parametrize("body", [None, [], {"nvext": 1}, {"nvext": {"agent_hints": [1]}}])
def test_a_body_of_any_other_shape_says_nothing(body: object) -> None:
    assert told("body", {}, body) == {}


@pytest.mark.parametrize(
    ("source", "expected"), [(None, "hint"), ("prior", "hint"), ("history", "history")]
)
def test_an_expected_length_counts_where_we_know_no_better(source: Any, expected: str) -> None:
    known = None if source is None else LengthDistribution.from_samples([9, 11], source)

    async def carried() -> Any:
        prediction: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        prediction.set_result(Prediction(1, known))
        state = RequestPrediction(prediction=prediction, told={"expected_tokens": 40})
        sampling = SimpleNamespace(max_new_tokens=30, custom_params=None)
        tokenized: Any = SimpleNamespace(sampling_params=sampling, input_ids=[1], mm_inputs=None)
        obj: Any = SimpleNamespace(sage=state)
        manager: Any = SimpleNamespace(
            mm_processor=None, model_config=SimpleNamespace(vocab_size=10)
        )
        await attach(manager, obj, tokenized)
        return decode(sampling.custom_params)

    found = asyncio.run(carried())
    assert found.source == expected
    assert found.lengths[-1] == (30 if expected == "hint" else 11)  # never above its cap


def test_the_page_has_them_all() -> None:
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| (.+?) \|$", PAGE, re.M))
    ours = {**HEADERS, **{f"nvext.agent_hints.{name}": hint for name, hint in AGENT_HINTS.items()}}
    for name, hint in ours.items():
        assert f"`{hint}`" in rows[name] or hint == "expected_tokens", name
    assert set(CLASS_HEADERS) < rows.keys()
    assert {*ours.values()} - {"priority", "expected_tokens"} <= {*CLIENTS_HINTS}
