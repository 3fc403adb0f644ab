"""The awaited server is the launched one."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bench.engines.server import server
from bench.engines.server.server import Server, ServerError

_SERVES = """
import sys
from tests.bench.engines.server.test_server import Healthy, HTTPServer
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_another_programs_answer_is_not_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = (sys.executable, "-c", _SERVES)
    with Server(tmp_path, log=tmp_path / "ours.log", command=ours) as started:
        assert started.running()
    with HTTPServer(("127.0.0.1", 0), Healthy) as other:
        threading.Thread(target=other.serve_forever).start()
        taken = other.server_port, (tmp_path / "lock").open("w")
        monkeypatch.setattr(server, "_reserve_port", lambda: taken)
        idle = (sys.executable, "-c", "import time; time.sleep(600)")
        late = Server(tmp_path, log=tmp_path / "late.log", command=idle, start_timeout_s=0.1)
        with pytest.raises(ServerError, match="did not answer"), late:
            pass
        other.shutdown()
