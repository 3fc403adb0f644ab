"""How many run at once on a real server, where memory is what is short."""

from __future__ import annotations

import re
from pathlib import Path

from bench.exactness import STRICT, ask, compare
from bench.policy_server import CPU_ENV
from tests.engine.serving import SHORT_PROMPT, SageServer, warmed_store

NUM_REQUESTS, CAP = 6, 600
# SGLang asks for the whole cap of a newcomer, and lets in one of these at a time. They are
# foreseen to get 5 to 7 tokens each.
FLAGS = ["--max-total-tokens", "800", "--decode-log-interval", "1"]


def test_requests_foreseen_to_be_short_are_let_in_and_bear_it_when_they_are_not(
    model: Path, tmp_path: Path
) -> None:
    asked = [(f"{SHORT_PROMPT} Case {i}.", CAP) for i in range(NUM_REQUESTS)]
    unbounded = [{"ignore_eos": False}]
    store = warmed_store(tmp_path / "store")
    with SageServer(
        model,
        tmp_path,
        store,
        policy="fcfs-foresight",  # admission by foreseen lengths, and nothing else
        flags=FLAGS,
        env=CPU_ENV | STRICT,
    ) as server:
        together = ask(server, asked, NUM_REQUESTS, sampling=unbounded)
        running = re.findall(r"Decode batch.*?#running-req: (\d+)", server.log.read_text())
        assert max(map(int, running)) > 2
        # They get 100 times what was foreseen, and then the pool does not do for all of them.
        assert sum(answer.num_retractions for answer in together) > 0
        assert compare(ask(server, asked, 1, sampling=unbounded), together)[0] == 0
        assert server.stats()["num_policy_errors"] == 0
        assert server.stats()["num_unranked"] == 0
        assert server.running()
