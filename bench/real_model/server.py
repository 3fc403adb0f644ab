"""A server with the real model; `python -m bench.real_model.server [QUESTION]` asks it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
import yaml

from bench.engines.rival import Rival
from bench.engines.server.policy_server import CPU_ENGINE_FLAGS, CPU_ENV
from bench.engines.server.server import Server, ServerError
from bench.real_model.fetch import FetchError, fetch
from sage_sched.registry import policy_names

QUESTION = "What is the capital of France? Answer in one sentence."
_FLAGS = (
    *CPU_ENGINE_FLAGS, "--max-total-tokens", "16384", "--max-running-requests", "16",
    "--log-level-http", "warning",
)  # fmt: skip


def serve(
    policy: str,
    folder: Path,
    flags: Sequence[str] = (),
    settings: Mapping[str, dict[str, Any]] | None = None,
) -> Server:
    """A server that is not started yet, the model fetched first. Raises FetchError.

    policy: see Rival. folder: for its log and its store, so that no other server's is taken.
    flags: SGLang's; the last of equal ones counts. settings: of --sage-config, by section.
    """
    model = fetch()
    rival = Rival.parse(policy)
    chosen = [*rival.flags, "--chat-template", str(model / "chat_template.jinja"), *_FLAGS, *flags]
    if policy in policy_names():
        sections = {"store": {"path": str(folder / "store")}} | dict(settings or {})
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / f"{policy}.yaml"
        config.write_text(yaml.safe_dump(sections), encoding="utf-8")
        chosen += ["--sage-config", str(config)]
    return Server(
        model,
        chosen,
        log=folder / f"{policy}.log",
        env={**CPU_ENV, **rival.env},
    )


def chat(url: str, prompt: str, **body: Any) -> dict[str, Any]:
    """/v1/chat/completions with one user turn; the response. Raises requests.RequestException."""
    messages = [{"role": "user", "content": prompt}]
    asked = {"model": "default", "messages": messages, **body}
    answer = requests.post(f"{url}/v1/chat/completions", json=asked, timeout=1800)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def _started(folder: Path) -> Server:
    server = serve("sage", folder)
    print("Starting SGLang with --schedule-policy sage (half a minute) ...", flush=True)
    return server


def main() -> int:
    question = " ".join(sys.argv[1:]) or QUESTION
    try:
        with tempfile.TemporaryDirectory() as folder, _started(Path(folder)) as server:
            began = time.monotonic()
            answer = chat(server.url, question, temperature=0, max_tokens=512)
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
