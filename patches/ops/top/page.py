"""Serves the view of `sage-sched top` as a page that draws the last minutes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from patches.ops.top.reading import Window
from patches.ops.top.rows import ROWS, found, text_of
from sage_sched.errors import UserError

_HTML = Path(__file__).with_name("page.html")


class Page:
    """A page at an address, and the figures that it asks for once a second."""

    def __init__(self, at: tuple[str, int], shown: str) -> None:
        """Raises UserError if the address cannot be used. shown: the server's address."""
        rows = [{"group": r.group, "name": r.name, "title": r.title} for r in ROWS]
        about = json.dumps({"server": shown, "rows": rows}).replace("<", "\\u003c")
        self._html = _HTML.read_text(encoding="utf-8").replace("{{about}}", about).encode()
        self._said: dict[str, Any] = {}
        try:
            self._server = ThreadingHTTPServer(at, self._handler())
        except OSError as error:
            raise UserError(f"--serve {at[0]}:{at[1]} cannot be used: {error}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def show(self, window: Window) -> None:
        """Show the figures of a window."""
        values = found(window)
        figures = {r.name: (values[r.name], text_of(values[r.name], r.unit)) for r in ROWS}
        self._said = {"number": self._said.get("number", 0) + 1, "figures": figures}

    def problem(self, said: str) -> None:
        """Show why there are no figures."""
        self._said = {"number": self._said.get("number", 0) + 1, "problem": said}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/":
                    self._answer("text/html; charset=utf-8", page._html)
                elif self.path == "/figures":
                    self._answer("application/json", json.dumps(page._said).encode())
                else:
                    self.send_error(404)

            def _answer(self, kind: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing for each request."""

        return Handler
