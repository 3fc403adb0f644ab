"""The class of a request, and its promises."""

from __future__ import annotations

from collections import Counter

import pytest

from sage_sched.job import NO_HINTS, Hints
from sage_sched.slo import SloClaims, SloClass, SloConfig

CLASSES = {
    "interactive": SloClass(10, 2.0, 1000.0, 50.0, min_ttft_slo_ms=500.0, min_tpot_slo_ms=25.0),
    "default": SloClass(0, 1.0, 5000.0, 100.0),
    "bulk": SloClass(-10, 0.5),
}


def claims(trust: str, classes: dict[str, SloClass] = CLASSES) -> SloClaims:
    return SloClaims(SloConfig(trust=trust, default="default", classes=classes))


@pytest.mark.parametrize(
    ("trust", "header", "priority", "name"),
    [
        ("none", "bulk", 10, "default"),
        ("header", "bulk", 10, "bulk"),
        ("header", None, 10, "default"),
        ("header", "nobility", None, "default"),
        ("body", "bulk", 10, "interactive"),
        ("body", "bulk", None, "default"),
        ("body", None, 11, "default"),
        ("body", None, True, "default"),
        ("body", None, "10", "default"),
    ],
)
def test_classes_need_trust(trust: str, header: str | None, priority: object, name: str) -> None:
    assert claims(trust).class_of(header, priority) == name


@pytest.mark.parametrize(
    ("trust", "priority", "given", "urgency"),
    [
        ("body", 1, 3, 2),
        ("body", 9, 3, 1),
        ("body", -9, 3, 5),
        ("body", 9, 4, 4),
        ("body", True, 3, 3),
        ("header", 9, 3, 3),
        ("none", 9, 3, 3),
    ],
)
def test_priority_means_urgency(trust: str, priority: object, given: int, urgency: int) -> None:
    none = SloClaims(SloConfig(trust=trust))
    assert none.hints("", Hints(urgency=given), priority).urgency == urgency


def test_a_class_says_how_urgent_its_requests_are() -> None:
    emergencies = claims("header", {"default": SloClass(), "triage": SloClass(1, urgency=1)})
    assert emergencies.hints("triage", Hints(urgency=5), 0).urgency == 1


def test_without_classes_nothing_is_said_of_a_request() -> None:
    none = SloClaims(SloConfig(trust="header"))
    assert none.class_of("interactive", 10) == ""
    assert none.hints("", NO_HINTS) == NO_HINTS


def test_if_all_claim_the_best_class_those_beyond_its_share_get_the_default() -> None:
    best = SloClass(priority=10, max_share=0.2)
    shared = claims("header", {"best": best, "default": SloClass()})
    granted = [shared.class_of("best", None) for _ in range(1000)]
    assert Counter(granted) == {"best": 200, "default": 800}
    assert max(Counter(granted[i : i + 100])["best"] for i in range(900)) <= 20
    assert shared.stats()["num_demoted"] == 800


def test_a_share_is_there_again_when_others_have_come() -> None:
    shared = claims("header", {"best": SloClass(priority=1, max_share=0.1), "default": SloClass()})
    for _ in range(3):
        assert [shared.class_of("best", None) for _ in range(10)] == ["best"] * 10
        assert [shared.class_of(None, None) for _ in range(90)] == ["default"] * 90


def test_a_client_may_ask_for_its_own_deadlines_but_for_none_below_the_floors() -> None:
    doors = claims("header")
    assert doors.hints("interactive", NO_HINTS) == Hints(
        weight=2.0, ttft_slo_ms=1000.0, tpot_slo_ms=50.0, slo_class="interactive"
    )
    asked = doors.hints("interactive", Hints(ttft_slo_ms=0.001, tpot_slo_ms=70.0))
    assert (asked.ttft_slo_ms, asked.tpot_slo_ms) == (500.0, 70.0)
    assert doors.stats()["num_clamped"] == 1
    bulk = doors.hints("bulk", Hints(tpot_slo_ms=70.0))
    assert (bulk.ttft_slo_ms, bulk.tpot_slo_ms, bulk.has_slo) == (None, 70.0, True)
    assert not doors.hints("bulk", NO_HINTS).has_slo
    assert doors.stats()["num_clamped"] == 1


def test_a_tenant_is_named_by_a_header_only_if_headers_are_trusted() -> None:
    fair = {"default": SloClass(fair=True)}
    for trust, tenant in (("header", "acme"), ("body", "client's"), ("none", "client's")):
        found = claims(trust, fair).hints("default", Hints(tenant="client's"), tenant="acme")
        assert (found.tenant, found.shares_fairly) == (tenant, True)
    long = claims("header", fair).hints("default", NO_HINTS, tenant="x" * 1000)
    assert len(long.tenant) == 256
    assert not claims("header").hints("default", NO_HINTS, tenant="acme").shares_fairly


@pytest.mark.parametrize("weight", [1e-3, 1e3])
def test_what_a_client_and_its_class_say_together_is_a_weight_too(weight: float) -> None:
    config = SloConfig(classes={"x": SloClass(weight=weight)})
    assert SloClaims(config).hints("x", Hints(weight=weight)).weight == weight
