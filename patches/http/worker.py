"""The app of the HTTP processes of --tokenizer-worker-num: SGLang's own app with our hooks.

SGLang loads no plugin in them, but serves the app that SGLANG_HTTP_SERVER_APP_PATH names.
"""

from __future__ import annotations

from sglang.srt.entrypoints.http_server import app

from patches.compat import check_release
from patches.http.hooks import http_hooks

__all__ = ["app"]

check_release()
http_hooks.apply()
