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
FAIR = {"default": SloClass(fair=True)}


def claims(trust: str, classes: dict[str, SloClass] = CLASSES) -> SloClaims:
    default = "default" if classes else ""
    return SloClaims(SloConfig(trust=trust, default=default, classes=classes))


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
    assert claims(trust, {}).class_of(header, priority) == ""


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
    assert claims(trust, {}).hints("", Hints(urgency=given), priority).urgency == urgency


def test_a_class_says_how_urgent_its_requests_are() -> None:
    emergencies = claims("header", {"default": SloClass(), "triage": SloClass(1, urgency=1)})
    assert emergencies.hints("triage", Hints(urgency=5), 0).urgency == 1


def test_claims_of_the_best_class_beyond_its_share_get_the_default() -> None:
    best = SloClass(priority=10, max_share=0.2)
    shared = claims("header", {"best": best, "default": SloClass()})
    for _ in range(1000):
        shared.class_of("best", None, only_asks=True)
    granted = [shared.class_of("best", None) for _ in range(1000)]
    assert Counter(granted) == {"best": 200, "default": 800}
    assert max(Counter(granted[i : i + 100])["best"] for i in range(900)) <= 20
    assert shared.stats()["num_demoted"] == 800
    # The share is there again when others have come.
    for _ in range(3):
        assert {shared.class_of(None, None) for _ in range(90)} == {"default"}
        assert [shared.class_of("best", None) for _ in range(10)] == ["best"] * 10


@pytest.mark.parametrize(
    ("name", "asked", "promised", "num_clamped"),
    [
        ("interactive", NO_HINTS, (1000.0, 50.0), 0),
        # No deadline is below the floor of its class.
        ("interactive", Hints(ttft_slo_ms=0.001, tpot_slo_ms=70.0), (500.0, 70.0), 1),
        ("bulk", Hints(tpot_slo_ms=70.0), (None, 70.0), 0),
        ("bulk", NO_HINTS, (None, None), 0),
    ],
)
def test_a_client_may_ask_for_its_own_deadlines(
    name: str, asked: Hints, promised: tuple[float | None, ...], num_clamped: int
) -> None:
    doors = claims("header")
    found = doors.hints(name, asked)
    assert (found.ttft_slo_ms, found.tpot_slo_ms) == promised
    assert (found.slo_class, found.weight) == (name, CLASSES[name].weight)
    assert doors.stats()["num_clamped"] == num_clamped


@pytest.mark.parametrize(
    ("trust", "tenant"), [("header", "acme"), ("body", "client's"), ("none", "client's")]
)
def test_a_tenant_is_named_by_a_header_only_if_headers_are_trusted(trust: str, tenant: str) -> None:
    found = claims(trust, FAIR).hints("default", Hints(tenant="client's"), tenant="acme")
    assert (found.tenant, found.shares_fairly) == (tenant, True)
    assert not claims(trust).hints("default", NO_HINTS, tenant="acme").shares_fairly


def test_a_long_name_of_a_tenant_is_cut() -> None:
    assert len(claims("header", FAIR).hints("default", NO_HINTS, tenant="x" * 1000).tenant) == 256


@pytest.mark.parametrize("weight", [1e-3, 1e3])
def test_what_a_client_and_its_class_say_together_is_a_weight_too(weight: float) -> None:
    config = SloConfig(classes={"x": SloClass(weight=weight)})
    assert SloClaims(config).hints("x", Hints(weight=weight)).weight == weight
