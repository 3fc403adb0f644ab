"""What clients saw, as numbers; with times of our making in a server's place."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from bench.engines.clock.device import Device
from bench.engines.clock.device_clock import STATE
from bench.engines.server import session_servers
from bench.engines.server.server import ServerError
from bench.engines.server.session_client import Times, serve_sessions
from bench.engines.server.session_servers import SessionServers, as_seen
from bench.engines.simulator.presets import H800_QWEN3_32B
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Served, alone_s
from bench.experiment.spec import Arm, Load
from bench.workloads.two_kinds import TwoKinds
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints

REQUEST = SimRequest(
    arrival_s=0.0,
    input_tokens=40,
    output_tokens=9,
    max_new_tokens=100,
    distribution=LengthDistribution.from_samples([9], "truth"),
    class_name="any",
    hints=Hints(ttft_slo_ms=1_000, tpot_slo_ms=100, weight=2.0, slo_class="w2"),
)


def test_tokens_between_two_looks_came_evenly() -> None:
    """Due at 1.1, 1.2 … 1.8 s. The first five come by 1.4 s, 0.1 s each; the others 0.2 s each."""
    times = Times(10.0, 11.0, 12.2, 0, ((11.0, 1), (11.4, 5), (12.2, 9)))
    assert times.token_s(9) == pytest.approx([11, 11.1, 11.2, 11.3, 11.4, 11.6, 11.8, 12, 12.2])
    early = replace(times, arrival_s=10.01)  # by 0.01 s
    late = replace(times, arrival_s=9.99)
    seen = as_seen(H800_QWEN3_32B, [REQUEST] * 2, [early, late])
    assert seen.num_next_on_time.tolist() == [4, 0]
    assert seen.ttlt_s == pytest.approx([2.19, 2.21])
    assert seen.alone_s[0] == alone_s(H800_QWEN3_32B, 40, 9)
    assert seen.duration_s == pytest.approx(12.2 - 9.99)
    # Both first tokens count once and on time for one; 5 tokens of 18, each for 2.
    assert seen.attainment()["tdg_ratio"] == pytest.approx(5 / 18)


def serve(status: int, *lines: str) -> tuple[list[Times], list[dict[str, object]]]:
    """What a client has of a server that answers so, and what it was asked."""
    asked: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for line in lines:
            await response.write(f"data: {line}\n\n".encode())
        return response

    async def main() -> list[Times]:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            return await serve_sessions(
                f"http://127.0.0.1:{port}",
                [REQUEST],
                vocabulary=2_000,
                speed=4.0,
                label="",
                priority_of=lambda request: int(request.hints.weight),
            )
        finally:
            await runner.cleanup()

    return asyncio.run(main()), asked


def said(tokens: int, reason: str) -> str:
    meta = f'"completion_tokens": {tokens}, "finish_reason": {reason}, "cached_tokens": 3'
    return f'{{"meta_info": {{{meta}}}}}'


def test_a_client_notes_when_it_had_how_many_tokens() -> None:
    (times,), (asked,) = serve(200, said(1, "null"), said(9, '{"type": "stop"}'), "[DONE]")
    assert [count for _, count in times.seen] == [1, 9]
    assert times.arrival_s <= times.first_token_s == times.seen[0][0] <= times.last_token_s
    assert times.cached_tokens == 3
    assert asked["priority"] == 2


@pytest.mark.parametrize(
    ("status", "lines"),
    [
        (200, ()),
        (400, ("no",)),
        (200, (said(1, '{"type": "abort"}'),)),
        (200, ('{"error": {"message": "no"}}',)),
    ],
)
def test_an_answer_that_is_none_ends_the_run(status: int, lines: tuple[str, ...]) -> None:
    with pytest.raises(ServerError):
        serve(status, *lines)


def held_up(monkeypatch: pytest.MonkeyPatch, *late_s: float) -> tuple[Served, list[str]]:
    """Of a server whose host holds each try up for so long: what is found, and what was served."""
    kept, tries = SimpleNamespace(device=Device.named("h800-qwen3-32b", 1.0)), list[str]()
    states = iter(s for late in late_s for s in (dict.fromkeys(_COUNTED, 0.0), _did(late)))

    async def serve_again(*args: object, label: str, **kw: object) -> list[Times]:
        tries.append(label)
        return [Times(0.0, 1.0, 2.0, 7, ((2.0, 9),))]

    kept.get = lambda policy, name: SimpleNamespace(url="")
    monkeypatch.setattr(session_servers, "internal_state", lambda _: {STATE: next(states)})
    monkeypatch.setattr(session_servers, "serve_sessions", serve_again)
    monkeypatch.setattr(session_servers, "KeptServer", lambda _: nullcontext(kept))
    monkeypatch.setattr(SessionServers, "_servers", lambda *_: None)
    servers = SessionServers(Load(name="any"), TwoKinds(), Path(), 1.0)
    return servers(Arm(policy="sage"), [REQUEST]), tries


def _did(late_s: float) -> dict[str, float]:
    return {**dict.fromkeys(_COUNTED, 1.0), "device_s": 100.0, "late_s": late_s}


_COUNTED = ("num_steps", "device_s", "num_late", "late_s", "num_moves", "moved_s", "cpu_s")


def test_what_the_host_held_up_is_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tries = held_up(monkeypatch, 30.0, 1.0)
    assert (found.ttlt_s.tolist(), tries) == ([2.0], ["sage", "sage"])
    assert found.cached_tokens == 7


def test_a_host_that_is_too_slow_every_time_gives_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ServerError, match=r"30\.0 s of 100\.0 s"):
        held_up(monkeypatch, 30.0, 30.0, 30.0, 0.0)
