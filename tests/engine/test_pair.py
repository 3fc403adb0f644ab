"""A prefill server and a decode server, behind a balancer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import requests

from tests.checks.exactness import TWO_RANKS, ask, differences
from tests.engine import mooncake_stand_in, torch_kernels
from tests.engine.conftest import ASKED, Stock
from tests.engine.pair import Pair
from tests.engine.serving import CHECKED, SHORT_PROMPT, SageServer, generate, wait_until
from tests.engine.test_modes import ADAPTERS, adapter_flags, answer

pytestmark = pytest.mark.long
# More requests may run on the decode server than can fit to their end.
_DECODE_FLAGS = (
    "--max-total-tokens", "640", "--max-running-requests", "16",
    "--num-reserved-decode-tokens", "8",
)  # fmt: skip


def pair_of(
    model: Path,
    factory: pytest.TempPathFactory,
    more: Sequence[str] = (),
    decode: Sequence[str] = (),
    env: Callable[[Path], Mapping[str, str]] = lambda folder: {},
) -> Pair:
    """more, decode: flags of both, and of the decode server alone. env: makes an environment for a
    server's folder."""

    def start(mode: str, flags: Sequence[str]) -> SageServer:
        folder = factory.mktemp(mode)
        own = [*_DECODE_FLAGS, *decode] if mode == "decode" else []
        return SageServer(
            model,
            folder,
            flags=[*flags, *own, *more],
            env=CHECKED | mooncake_stand_in.install(folder) | {**env(folder)},
        )

    return Pair(start)


@pytest.fixture(scope="module")
def pair(_staged: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(model, tmp_path_factory) as servers:
        yield servers


def says_what_one_server_says(pair: Pair, stock: Stock) -> None:
    """Check that a pair gives the same answers, though requests leave its decode server."""
    num_different, largest = differences(stock, ask(pair, ASKED, 24))
    assert num_different == 0
    assert largest < 1e-4
    all_came_back(pair)


def all_came_back(pair: Pair) -> None:
    assert [each.stats()["num_policy_errors"] for each in (pair.prefill, pair.decode)] == [0, 0]
    moved = pair.decode.preemption()
    assert moved["num_resumed"] == moved["num_preemptions"] > 0
    assert moved["num_not_preemptible"] == {}


def test_a_pair_answers_as_one_server_and_learns(pair: Pair, stock: Stock) -> None:
    says_what_one_server_says(pair, stock)
    wait_until(lambda: len(pair.decode.history()) >= len(ASKED))
    prompts = tuple(prompt for prompt, _ in ASKED)
    learned = {prompt: tokens for prompt, tokens, _ in pair.decode.history(prompts)}
    assert [learned[prompt] for prompt, _ in ASKED] == [tokens for _, tokens in ASKED]
    assert pair.prefill.history() == []


def test_either_server_may_die_and_come_back(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        server.kill()
        with pytest.raises(requests.RequestException):
            generate(pair, SHORT_PROMPT)
        server.__enter__()
        assert generate(pair, SHORT_PROMPT)["meta_info"]["completion_tokens"] == 4


def test_two_ranks_and_a_radix_cache_on_the_decode_server(
    model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    decode = ["--disaggregation-decode-enable-radix-cache"]
    ranks = ["--tp-size", "2"]
    with pair_of(model, tmp_path_factory, ranks, decode, lambda _: TWO_RANKS) as pair:
        says_what_one_server_says(pair, stock)
        says_what_one_server_says(pair, stock)  # by now prompts are cached


def test_a_batch_has_room_for_one_adapter(
    model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = adapter_flags(tmp_path_factory.mktemp("adapters"))
    with pair_of(model, tmp_path_factory, flags, env=torch_kernels.install) as pair:
        asked = [
            partial(answer, pair, i, lora_path=ADAPTERS[i % len(ADAPTERS)])
            for i in range(len(ASKED))
        ]
        alone = [call() for call in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            assert [*pool.map(lambda call: call(), asked)] == alone
        assert all(ids != said.ids for ids, said in zip(alone, stock, strict=True))
        all_came_back(pair)
