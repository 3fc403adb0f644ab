"""A pytest plugin: the CPU time that the tests of a file may take.

CPU time of servers and other processes counts too, so the host's load changes the result little.
Contention still adds some time; it is measured by a fixed piece of work and subtracted. A file that
takes more fails the run, and its most expensive tests are named.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.nursery import Nursery

# Seconds of a file's tests on the core of an idle host: of those that use a server, its start
# included, of the slow ones that `make test` runs too, and of those of `make check`. No file takes
# half as much on a busy host: what fails here is a new test that is out of all proportion.
BUDGETS_S = {"long": math.inf, "server": 400.0, "slow": 300.0, "quick": 30.0}
_PROPERTY = "cpu_s"
# Duration of the piece of work there, and the time between two measurements.
_REFERENCE_S, _SHORT_S = 0.03, 0.5
_NUM_SHOWN = 12


def kind_of(item: pytest.Item) -> str:
    """Its budget."""
    marks = {mark.name for mark in item.iter_markers()}
    return next((kind for kind in BUDGETS_S if kind in marks), "quick")


def slowness() -> float:
    """Return the slowdown against an idle host, at least 1."""
    began_s = time.thread_time()
    sum(i * i % 7 for i in range(300_000))
    return max(1.0, (time.thread_time() - began_s) / _REFERENCE_S)


class Meter:
    """In the process that runs tests."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._began_s = 0.0

    def _spent_s(self) -> float:
        return sum(os.times()[:4]) + self._nursery.spent_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._began_s = self._spent_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            spent_s = self._spent_s() - self._began_s
            if spent_s > _SHORT_S:
                spent_s /= slowness()
            item.user_properties.append((_PROPERTY, (kind_of(item), spent_s)))


class Ledger:
    """In the process that reports. Has the files' sums, and the tests' own, by kind."""

    def __init__(self) -> None:
        self._spent_s: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if report.when == "teardown" and name == _PROPERTY:
                kind, spent_s = value
                node, _, group = report.nodeid.rpartition("@")
                test = node if node and "]" not in group else report.nodeid
                self._spent_s[test.partition("::")[0], kind][test] = spent_s

    def _beyond(self) -> list[tuple[str, str]]:
        """The files that took too much, and the kind of their tests that did."""
        return [
            (file, kind)
            for (file, kind), tests in self._spent_s.items()
            if sum(tests.values()) > BUDGETS_S[kind]
        ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._beyond() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        sums = {key: sum(tests.values()) for key, tests in self._spent_s.items()}
        dearest = sorted(sums, key=lambda key: -sums[key])[:_NUM_SHOWN]
        terminalreporter.section(f"CPU seconds: {sum(sums.values()):.0f}, most of them of")
        for file, kind in dearest:
            terminalreporter.line(f"{sums[file, kind]:7.1f}  {file} ({kind})")
        for file, kind in self._beyond():
            tests = self._spent_s[file, kind]
            terminalreporter.line(
                f"FAILED {file}: its {kind} tests may take {BUDGETS_S[kind]:.0f} CPU seconds "
                "(tests/budget.py), and of those that took more the dearest are",
                red=True,
            )
            for name in sorted(tests, key=lambda name: -tests[name])[:3]:
                terminalreporter.line(f"{tests[name]:7.1f}  {name}", red=True)
