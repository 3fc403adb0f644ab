"""The figures of `sage-sched top` from /metrics, and its page."""

from __future__ import annotations

import json
import math
import urllib.request

import pytest

from patches.ops.top.command import Watch
from patches.ops.top.page import Page
from patches.ops.top.reading import Reading, Window
from patches.ops.top.rows import ROWS, found, text_of
from sage_sched.cli import main
from sage_sched.errors import UserError

TTFT = "sglang:time_to_first_token_seconds"


def metrics(waiting: tuple[int, ...], requests: int, ttft: tuple[int, int, int]) -> str:
    """Return a server's series. waiting: of each data-parallel rank. ttft: up to 1 s, 2 s and 4
    s."""
    lines = [f'sglang:num_queue_reqs{{dp_rank="{i}"}} {n}' for i, n in enumerate(waiting)]
    lines += [f'sglang:num_requests_total{{model_name="m"}} {requests}']
    lines += ['sage:policy_info{policy="sage"} 1', 'sage:policy_info{policy="fcfs"} 0']
    edges = (*zip((1.0, 2.0, 4.0), ttft, strict=True), ("+Inf", ttft[-1]))
    lines += [f'{TTFT}_bucket{{le="{edge}"}} {count}' for edge, count in edges]
    return "\n".join(("# TYPE sglang:num_requests_total counter", *lines, ""))


def window(before: str, after: str, seconds: float = 10.0) -> Window:
    return Window(Reading.parse(before, 5.0), Reading.parse(after, 5.0 + seconds))


def test_figures_are_those_of_the_time_between_two_readings() -> None:
    figures = found(window(metrics((1, 2), 100, (50, 50, 50)), metrics((3, 4), 140, (60, 80, 90))))
    assert figures["num_waiting"] == 7
    assert figures["requests_per_s"] == 4.0
    # 40 first tokens: 10 within 1 s, 20 more within 2 s, 10 more within 4 s.
    assert figures["ttft_attainment"] == 0.75
    assert figures["ttft_p50_s"] == 1.5
    assert figures["ttft_p99_s"] == pytest.approx(2 + 2 * 9.6 / 10)
    assert figures["num_swapped"] is figures["e2e_p99_s"] is None  # a stock policy has none


def test_a_restarted_server_counts_from_zero() -> None:
    figures = found(window(metrics((0,), 100, (50, 50, 50)), metrics((0,), 20, (10, 10, 10))))
    assert (figures["requests_per_s"], figures["ttft_attainment"]) == (2.0, 1.0)


def test_nothing_has_happened() -> None:
    same = metrics((0,), 100, (50, 50, 50))
    figures = found(window(same, same, seconds=0.0))
    assert figures["requests_per_s"] is figures["ttft_p99_s"] is None
    assert math.isnan(window("", "").quantile(TTFT, 0.5))


def test_the_last_minute_counts() -> None:
    times = iter([0.0, 30.0, 59.0, 89.0, 91.0])
    counts = iter([0, 30, 60, 90, 1000])
    watch = Watch(lambda: metrics((0,), next(counts), (0, 0, 0)), lambda: next(times))
    looks = [watch.look() for _ in range(5)]
    assert [look.last.at_s - look.first.at_s for look in looks] == [0, 30, 59, 89, 61]
    assert looks[-1].rate("sglang:num_requests_total") == pytest.approx(970 / 61)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(None, "s", "–"), (0.1234, "%", "12.3 %"), (0.0123, "ms", "12.3 ms"), (250.4, "s", "250 s"),
     (7.0, "", "7"), (0.5, "/s", "0.5 /s")],
)  # fmt: skip
def test_figures_have_their_units(value: float | None, unit: str, text: str) -> None:
    assert text_of(value, unit) == text


def test_the_page_shows_the_same_figures() -> None:
    shown = window(metrics((1,), 100, (50, 50, 50)), metrics((3,), 140, (60, 80, 90)))
    with Page(("127.0.0.1", 0), "http://<b>") as page:
        html = urllib.request.urlopen(page.url, timeout=30).read().decode()
        assert all(json.dumps(row.title) in html for row in ROWS)
        assert "<b>" not in html.partition("const about")[2].partition("\n")[0]
        page.show(shown)
        answer = json.loads(urllib.request.urlopen(f"{page.url}/figures", timeout=30).read())
        assert answer["figures"]["num_waiting"] == [3.0, "3"]
        page.problem("the server is away")
        answer = json.loads(urllib.request.urlopen(f"{page.url}/figures", timeout=30).read())
        assert answer == {"number": 2, "problem": "the server is away"}


def test_an_answer_of_no_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "127.0.0.1:1", "--once"]) == 2
    assert "no server answers at http://127.0.0.1:1/metrics" in capsys.readouterr().err
    with pytest.raises(UserError, match="not in Prometheus' format"):
        Reading.parse("<html>", 0.0)
    with pytest.raises(SystemExit):
        main(["top", "--serve", "nowhere"])
