"""Implements `sage-sched top`, a live view of a server in the terminal, or as a page."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from patches.ops.top.page import Page
from patches.ops.top.reading import Reading, Window
from patches.ops.top.rows import ROWS, found, text_of
from predictor_store.ask_server import RefusedError, add_key, fetch, key_of
from predictor_store.terminal import add_json, host_and_port, print_json, server_url
from sage_sched.errors import UserError

# Quantiles and rates are those of this time.
_WINDOW_S = 60.0
_INTERVAL_S = 2.0


class Watch:
    """Reads a server again and again, and keeps the readings of the last minute."""

    def __init__(self, read: Callable[[], str], clock: Callable[[], float]) -> None:
        """read: returns the text of /metrics. clock: in seconds."""
        self._read, self._clock = read, clock
        self._readings = deque[Reading]()

    def look(self) -> Window:
        """Read the server, and return what happened in the last minute. Raises UserError."""
        self._readings.append(Reading.parse(self._read(), self._clock()))
        last = self._readings[-1]
        while len(self._readings) > 2 and last.at_s - self._readings[1].at_s >= _WINDOW_S:
            self._readings.popleft()
        return Window(self._readings[0], last)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Watch a server that was started with --enable-metrics, under any policy: load, memory, "
        "latency, goodput and predictions of the last minute."
    )
    parser.add_argument(
        "--url", type=server_url, default="http://127.0.0.1:30000", help="default: %(default)s"
    )
    parser.add_argument(
        "--serve", type=host_and_port, metavar="[HOST:]PORT",
        help="serve the view as a page instead of printing it",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one view and end")
    add_key(parser, "the server's --api-key")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    watch = Watch(_reader(args.url, key_of(args.key_file)), time.monotonic)
    watch.look()  # an address without a server is an error at once
    if args.serve:
        with Page(args.serve, args.url) as page, contextlib.suppress(KeyboardInterrupt):
            print(f"The view of {args.url} is at {page.url}", flush=True)
            _repeat(watch, page.show, page.problem)
        return 0
    if args.once or args.json:
        time.sleep(_INTERVAL_S)
        window = watch.look()
        print_json(found(window)) if args.json else Console().print(view(window, args.url))
        return 0
    with Live(screen=True, auto_refresh=False) as live, contextlib.suppress(KeyboardInterrupt):
        _repeat(
            watch,
            lambda window: live.update(view(window, args.url), refresh=True),
            lambda said: live.update(said, refresh=True),
        )
    return 0


def _reader(url: str, key: str) -> Callable[[], str]:
    def read() -> str:
        try:
            return fetch(f"{url}/metrics", key).decode(errors="replace")
        except RefusedError as error:
            raise UserError(f"{error}; start the server with --enable-metrics") from error

    return read


def _repeat(
    watch: Watch, show: Callable[[Window], object], problem: Callable[[str], object]
) -> None:
    """Look again and again until interrupted. A server that is away may come back."""
    pause = threading.Event()
    while True:
        try:
            show(watch.look())
        except UserError as error:
            problem(str(error))
        pause.wait(_INTERVAL_S)


def view(window: Window, url: str) -> Group:
    """Return the figures as panels, a group of figures in each."""
    policy = window.last.label("sage:policy_info", "policy") or "a policy of SGLang"
    seconds, values = window.last.at_s - window.first.at_s, found(window)
    panels = []
    for group in dict.fromkeys(row.group for row in ROWS):
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(justify="right", min_width=9)
        for row in ROWS:
            if row.group == group:
                table.add_row(row.title, text_of(values[row.name], row.unit))
        panels.append(Panel(table, title=group, title_align="left"))
    return Group(f"{url} · {policy} · the last {seconds:.0f} s", Columns(panels))
