"""Effects of deliberately broken preemption on clients."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.checks.exactness import ask, differences
from tests.engine import saboteur, stage
from tests.engine.conftest import ASKED, Stock
from tests.engine.crowds import ask_one, ask_together
from tests.engine.kinds import settings
from tests.engine.serving import CHECKED, SHORT_PROMPT, SageServer, generate, wait_until


def counted(server: SageServer) -> Counter[str]:
    counters = server.preemption()
    return Counter({name: n for name, n in counters.items() if isinstance(n, int)})


def test_kv_that_does_not_come_back_is_noticed(yielding: SageServer, stock: Stock) -> None:
    # So the comparisons of the other tests can fail.
    with stage.sabotaged(yielding, saboteur.SKIP_RESTORE):
        assert differences(stock, ask_together(yielding, ASKED))[0] > 5


@pytest.mark.parametrize(
    ("failure", "counter", "is_recomputed"),
    [
        (saboteur.FAIL_BACKUP, "num_preemptions", False),  # it goes on running
        (saboteur.FAIL_RESTORE, "num_recomputed", True),
        (saboteur.NO_ROOM, "num_without_device_room", False),  # it keeps its copy
    ],
)
def test_answers_stay_the_same_if_moves_fail(
    yielding: SageServer, stock: Stock, failure: int, counter: str, is_recomputed: bool
) -> None:
    before = counted(yielding)
    with stage.sabotaged(yielding, failure):
        found = ask_together(yielding, ASKED)
    assert differences(stock, found)[0] == 0
    news = counted(yielding)
    news.subtract(before)
    assert news[counter] > 3
    assert news["num_preemptions"] == news["num_resumed"] + news["num_recomputed"]
    assert (news["num_recomputed"] > 0) == is_recomputed


def test_killed_with_requests_swapped_the_next_server_starts_on_its_store(
    yielding: SageServer, model: Path, tmp_path: Path
) -> None:
    # This test kills the shared server, so it comes last.
    generate(yielding, SHORT_PROMPT)
    wait_until(lambda: bool(yielding.history()))
    before = yielding.history()

    def ask_a_dying_server(i: int) -> None:
        with pytest.raises(requests.RequestException):
            ask_one(yielding, ASKED[i])

    def kill(state: dict[str, Any]) -> None:
        assert len(state["swapped"]) >= 2
        yielding.kill()

    stage.together(yielding, [partial(ask_a_dying_server, i) for i in range(12)], kill, swapped=2)

    folder = tmp_path / "next"
    folder.mkdir()
    with SageServer(model, folder, yielding.store, env=CHECKED) as server:
        assert server.history()[: len(before)] == before
        generate(server, SHORT_PROMPT)
        wait_until(lambda: len(server.history()) > len(before))


def test_both_ranks_go_on_if_the_copy_fails_on_one(two_ranks: SageServer) -> None:
    settings(two_ranks, {"schedule_policy": "fastserve", "preemption": {"enabled": True}})
    before = two_ranks.preemption()
    with stage.sabotaged(two_ranks, saboteur.FAIL_BACKUP_ON_ONE_RANK):
        found = ask_together(two_ranks, ASKED[:18])
    assert differences(ask(two_ranks, ASKED[:18], 6), found)[0] == 0
    assert two_ranks.preemption()["num_preemptions"] > before["num_preemptions"] + 3
    assert two_ranks.log.read_text().count("a copy to host memory failed on some rank") > 3
