"""Prefills that are cut at every layer, on a real server with a Mixtral in single precision."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.engine import kv_witness, stage
from tests.engine.kinds import NUM_LAYERS, settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate

PROMPT = " ".join(f"paragraph {i} of a long document" for i in range(60))


class Sliced:
    """One that is shared, as it is used here."""

    def __init__(self, server: SageServer) -> None:
        self.server = server

    def ask(self, rid: str, prompt: str = PROMPT, urgency: int = 3, num_tokens: int = 6) -> Any:
        """Of urgency 2 it is latency-sensitive, and its prefill whole."""
        sampling = {"custom_params": {"urgency": urgency}, "ignore_eos": True}
        about = {"rid": rid, "return_logprob": True, "sampling_params": sampling}
        return generate(self.server, prompt, num_tokens, **about)

    def forget(self) -> None:
        """Nothing of any prompt is cached any more."""
        requests.post(f"{self.server.url}/flush_cache", timeout=60).raise_for_status()

    def order(self, what: str) -> None:
        """Of the witness, for one test."""
        kv_witness.order(self.server.log.parent, what)

    def digests(self) -> dict[str, str]:
        return kv_witness.digests(self.server)

    def stats(self) -> dict[str, Any]:
        return self.server.stats()


@pytest.fixture
def server(sliced: SageServer) -> Iterator[Sliced]:
    settings(sliced, {"schedule_policy": "qllm"})
    used = Sliced(sliced)
    used.forget()
    yield used
    used.order("")


def said(answer: Any) -> tuple[list[int], list[float]]:
    return answer["output_ids"], [one[0] for one in answer["meta_info"]["output_token_logprobs"]]


def test_a_cut_prefill_leaves_the_same_kv_and_says_the_same_to_the_bit(server: Sliced) -> None:
    whole = server.ask("whole", urgency=2)
    server.forget()
    before = server.stats()["slices"]
    cut = server.ask("cut")
    after = server.stats()["slices"]
    assert after["num_cuts"] - before["num_cuts"] == NUM_LAYERS - 1
    assert said(cut) == said(whole)
    kept = server.digests()
    assert kept["cut"] == kept["whole"]


def test_it_would_be_seen_if_what_was_computed_before_a_cut_were_lost(server: Sliced) -> None:
    whole = server.ask("sound", urgency=2)
    server.forget()
    server.order(kv_witness.ZERO_HIDDEN_STATES)
    spoilt = server.ask("spoilt")
    kept = server.digests()
    assert kept["spoilt"] != kept["sound"]
    assert said(spoilt)[1][0] != said(whole)[1][0]


def test_who_comes_meanwhile_passes_and_decodes_and_both_say_what_they_say_alone(
    server: Sliced,
) -> None:
    alone = [server.ask("1", urgency=2), server.ask("2", SHORT_PROMPT, urgency=2, num_tokens=12)]
    other = server.ask("3", SHORT_PROMPT * 2, urgency=2)
    server.forget()
    served = server.stats()["served_tokens"]
    passed = server.stats()["slices"]["num_passed"]
    server.order(kv_witness.AWAIT + "3")
    with ThreadPoolExecutor(3) as pool:
        with stage.held(server.server):
            long = pool.submit(server.ask, "long")
            stage.once_arrived(server.server, 1)
        # It stays at its first cut until two more have come, of whom one may pass.
        late = pool.submit(server.ask, "late", SHORT_PROMPT * 2)
        passes = pool.submit(server.ask, "passes", SHORT_PROMPT, urgency=2, num_tokens=12)
        answers = [each.result() for each in (long, passes, late)]
    assert [rid for rid in server.digests() if not rid.isdigit()][-3:] == [
        "passes", "long", "late",
    ]  # fmt: skip
    assert [said(answer)[0] for answer in answers] == [said(a)[0] for a in (*alone, other)]
    stats = server.stats()
    assert stats["slices"]["num_passed"] - passed == 1
    # Each token is counted once, however often a prefill was cut.
    about = [answer["meta_info"] for answer in answers]
    prefilled = sum(each["prompt_tokens"] - each["cached_tokens"] for each in about)
    assert stats["served_tokens"] - served == prefilled + 5 + 11 + 5
    assert stats["num_policy_errors"] == 0
