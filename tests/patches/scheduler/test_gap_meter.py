"""The gaps between tokens, against an account of each token."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patches.scheduler import gap_meter
from patches.scheduler.gap_meter import GapMeter
from tests.patches.schedulers import StandInBatch, make_request


class Account:
    """Counts each gap of each request, in seconds."""

    def __init__(self) -> None:
        self.gaps: dict[str, list[float]] = {"stayed": [], "left": []}
        self._last_s: dict[Any, float] = {}
        self._has_left = set[Any]()

    def got(self, req: Any, num_tokens: int, now_s: float) -> None:
        req.output_ids.extend([1] * num_tokens)
        if req in self._last_s:
            whose = "left" if req in self._has_left else "stayed"
            self.gaps[whose] += [now_s - self._last_s[req], *[0.0] * (num_tokens - 1)]
        self._has_left.discard(req)
        self._last_s[req] = now_s

    def leaves(self, req: Any) -> None:
        req.retraction_count += 1
        self._has_left.add(req)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("drafts", [False, True])
def test_each_gap_is_counted_once(seed: int, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come, are prefilled again, also at once, leave, come back and end. Under overlap an
    ended request is in one more batch."""
    script, clock_s = random.Random(seed), [0.0]
    monkeypatch.setattr(gap_meter, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    meter, account = GapMeter(), Account()
    running: list[Any] = []
    away: list[Any] = []
    ended: list[Any] = []

    def chunk(reqs: list[Any]) -> None:
        """A chunk of a prompt, which gets no token, beside requests that decode."""
        batch = StandInBatch([make_request(), *reqs], prefills=True)
        batch.decoding_reqs = reqs  # type: ignore[assignment]
        for _ in range(2):
            clock_s[0] += 0.03
            for req in reqs:
                account.got(req, 1, clock_s[0])
            meter.stepped(batch, SimpleNamespace(accept_lens=None))

    def step(reqs: list[Any], prefills: bool) -> None:
        clock_s[0] += script.choice([0.01, 0.02, 0.05])
        numbers = [1 if prefills or not drafts else script.randint(1, 3) for _ in reqs]
        for req, number in zip(reqs, numbers, strict=True):
            if req not in ended:
                account.got(req, number, clock_s[0])
        result = SimpleNamespace(accept_lens=torch.tensor(numbers) if drafts else None)
        meter.stepped(StandInBatch(reqs, prefills=prefills), result)

    for _ in range(300):
        step([*running, *ended], prefills=False)
        ended = []
        if running and not drafts and script.random() < 0.1:
            chunk([*running])
        came = [make_request() for _ in range(script.choice([0, 0, 0, 1, 2]))]
        came += [away.pop() for _ in range(script.randint(0, len(away))) if script.random() < 0.3]
        if came:
            step(came, prefills=True)
            running += came
        elif running and script.random() < 0.1:
            gone = running.pop(script.randrange(len(running)))
            account.leaves(gone)
            if script.random() < 0.3:
                step([gone], prefills=True)
                running.append(gone)
            elif script.random() < 0.5:
                away.append(gone)
            else:  # it comes back without a prefill
                step(running, prefills=False)
                running.append(gone)
        else:
            ended = [req for req in running if script.random() < 0.03]
            running = [req for req in running if req not in ended]
            for req in ended:
                meter.ended(req, was_aborted=False)

    for whose, gaps in account.gaps.items():
        found = meter.stats()["gaps"][whose]
        assert found["num"] == len(gaps)
        assert found["mean_ms"] == pytest.approx(1e3 * sum(gaps) / len(gaps), rel=1e-6)
        assert found["longest_ms"] == pytest.approx(1e3 * max(gaps), rel=1e-6)
