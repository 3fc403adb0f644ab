"""What clients saw, as numbers; with times of our making in a server's place."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web

from bench.comparison.session_bodies import as_seen
from bench.servers.server import ServerError
from bench.servers.session_client import Times, serve_sessions
from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.request import SimRequest
from bench.simulator.result import alone_s
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
