"""The site in a real browser, if there is one."""

from __future__ import annotations

import functools
import http.server
import json
import queue
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

# Each page in a frame of each width, since no browser window is as narrow as a phone. What a
# reader can scroll by itself, a table say, may be wider than the page.
_MEASURE = """
const scrolls = (element, body) => {
  for (let it = element; it && it !== body; it = it.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(it).overflowX)) return true;
  return false;
};
const measure = async (page, width) => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
  frame.src = "/" + page;
  await new Promise(done => { frame.onload = done; document.body.append(frame); });
  const { documentElement: root, body } = frame.contentDocument;
  await frame.contentDocument.fonts.ready;
  const wide = [...body.querySelectorAll("article *")].filter(element => {
    const { width, right } = element.getBoundingClientRect();
    return width && right > root.clientWidth + 1 && !scrolls(element.parentElement, body);
  });
  const found = wide.map(element => element.textContent.trim().slice(0, 60) || element.tagName);
  if (root.scrollWidth > root.clientWidth) found.push(`all of it: ${root.scrollWidth}`);
  const shown = body.querySelectorAll("article *").length;
  frame.remove();
  return { page, width, shown, found };
};
(async () => {
  const all = [];
  for (const width of WIDTHS) for (const page of PAGES) all.push(await measure(page, width));
  await fetch("/", { method: "POST", body: JSON.stringify(all) });
})();
"""


def measured(site: Path, widths: tuple[int, ...], profile: Path) -> list[dict[str, Any]]:
    """Measure each page at each width in pixels: `shown`, the number of elements in its text, and
    `found`, the parts wider than the page. Raises queue.Empty if the browser says nothing."""
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    script = _MEASURE.replace("WIDTHS", json.dumps(widths)).replace("PAGES", json.dumps(pages))
    told: queue.Queue[bytes] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path != "/measure":
                super().do_GET()
                return
            self._answer(f"<!doctype html><body><script>{script}</script>".encode())

        def do_POST(self) -> None:
            told.put(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        flags += ["--window-size=1600,1000", "--remote-debugging-port=0"]  # so that it stays
        browser = subprocess.Popen(
            [BROWSER, *flags, f"http://127.0.0.1:{server.server_port}/measure"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            found: list[dict[str, Any]] = json.loads(told.get(timeout=600))
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
    return found
