"""Serves the real model. `python -m bench.real_model.server [QUESTION]` asks it a question."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests

from bench.engines.server.policy_server import CPU_ENGINE_FLAGS, CPU_ENV, PolicyServers
from bench.engines.server.server import Server, ServerError
from bench.real_model.fetch import FetchError, fetch
from sage_sched.app.config import SageConfig

QUESTION = "What is the capital of France? Answer in one sentence."


def serve(policy: str, folder: Path) -> Server:
    """Fetch the model, and return a server of this policy that is not started yet. Raises
    FetchError.

    folder: for all files that are written.
    """
    model = fetch()
    flags = (
        *CPU_ENGINE_FLAGS, "--max-total-tokens", "16384", "--max-running-requests", "16",
        "--stream-interval", "1", "--chat-template", str(model / "chat_template.jinja"),
    )  # fmt: skip
    servers = PolicyServers(model=model, folder=folder, flags=flags, env=CPU_ENV, sage=SageConfig())
    return servers.server(policy, policy)


def ask(url: str, question: str) -> dict[str, Any]:
    """Return the answer of /v1/chat/completions. Raises requests.RequestException."""
    turns = [{"role": "user", "content": question}]
    body = {"model": "default", "messages": turns, "temperature": 0, "max_tokens": 512}
    answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=1800)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def main() -> int:
    question = " ".join(sys.argv[1:]) or QUESTION
    try:
        fetch()
        print("Starting SGLang with --schedule-policy sage (half a minute) ...", flush=True)
        with tempfile.TemporaryDirectory() as folder, serve("sage", Path(folder)) as server:
            began = time.monotonic()
            answer = ask(server.url, question)
            took_s = time.monotonic() - began
    except (FetchError, ServerError, requests.RequestException) as error:
        print(f"server: {error}", file=sys.stderr)
        return 1
    choice = answer["choices"][0]
    print(f"{question}\n\n{choice['message']['content']}\n")
    num_tokens = answer["usage"]["completion_tokens"]
    print(f"{num_tokens} tokens in {took_s:.1f} s; ended by {choice['finish_reason']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
