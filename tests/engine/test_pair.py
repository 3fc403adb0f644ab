"""A prefill server and a decode server, behind a balancer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import requests

from tests.checks import mooncake_stand_in
from tests.checks.exactness import TWO_RANKS, ask, differences
from tests.checks.pair import Pair
from tests.engine import stage, torch_kernels
from tests.engine.conftest import ASKED, Stock
from tests.engine.kinds import CHECKED, PATIENT, settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, wait_until
from tests.engine.test_modes import ADAPTERS, adapter, answer

pytestmark = pytest.mark.long
# More may run on the decode server than memory has room for to the end.
_POOL_TOKENS = 640
_FLAGS = {
    "prefill": (),
    "decode": (
        "--max-total-tokens",
        str(_POOL_TOKENS),
        "--max-running-requests",
        "16",
        "--num-reserved-decode-tokens",
        "8",
    ),
}
# Of prompts as long no two have room there.
_LONG_PROMPT = " ".join(["word"] * (_POOL_TOKENS // 2 + 20))


def pair_of(
    model: Path,
    factory: pytest.TempPathFactory,
    more: Mapping[str, Sequence[str]] | None = None,
    env: Callable[[Path], Mapping[str, str]] = lambda folder: {},
) -> Pair[SageServer]:
    """more: flags of each mode. env: makes an environment for a server's folder."""

    def start(mode: str, flags: Sequence[str]) -> SageServer:
        folder = factory.mktemp(mode)
        return SageServer(
            model,
            folder,
            flags=[*flags, *_FLAGS[mode], *(more or {}).get(mode, ())],
            env=CHECKED | mooncake_stand_in.install(folder) | {**env(folder)},
            settings=f'{PATIENT}[hints]\ntrust = "body"\n',
        )

    return Pair(start)


@pytest.fixture(scope="module")
def pair(
    _staged: None, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair[SageServer]]:
    with pair_of(model, tmp_path_factory) as servers:
        yield servers


def test_a_pair_answers_as_one_server_and_learns(pair: Pair[SageServer], stock: Stock) -> None:
    answers = ask(pair, ASKED, 24)
    num_different, largest = differences(stock.answers, answers)
    assert num_different == 0
    assert largest < 1e-4
    wait_until(lambda: len(pair.decode.history()) >= len(ASKED))
    prompts = tuple(prompt for prompt, _ in ASKED)
    learned = {prompt: tokens for prompt, tokens, _ in pair.decode.history(prompts)}
    assert [learned[prompt] for prompt, _ in ASKED] == [tokens for _, tokens in ASKED]
    assert pair.prefill.history() == []
    states = requests.get(f"{pair.url}/server_info", timeout=300).json()["internal_states"]
    assert [state["sage"]["num_policy_errors"] for state in states] == [0, 0]
    moved = pair.decode.stats()["preemption"]
    assert moved["num_resumed"] == moved["num_preemptions"] > 0
    assert moved["num_left_in_tree"] == 0


def test_a_decode_server_gives_room_in_the_order_of_its_policy(pair: Pair[SageServer]) -> None:
    levels = (5, 4, 1, 2, 3)
    calls = [
        partial(
            generate,
            pair,
            _LONG_PROMPT,
            rid=f"level {level}",
            sampling_params={"custom_params": {"urgency": level}},
        )
        for level in levels
    ]
    settings(pair.decode, {"schedule_policy": "urgency"})
    stage.together(pair.decode, calls)
    assert stage.started(pair.decode) == [f"level {level}" for level in sorted(levels)]
    settings(pair.decode, {"schedule_policy": "fcfs"})
    stage.together(pair.decode, calls)
    assert stage.started(pair.decode) == [f"level {level}" for level in levels]
    settings(pair.decode, {"schedule_policy": "sage"})


def test_a_prefill_server_takes_the_shortest_prompt_first(pair: Pair[SageServer]) -> None:
    lengths = (60, 5, 20)
    calls = [partial(generate, pair, "word " * n, rid=f"{n} words") for n in lengths]
    stage.together(
        pair.prefill, calls, once=lambda: stage.once_bootstrapped(pair.prefill, len(calls))
    )
    assert stage.started(pair.prefill) == [f"{n} words" for n in sorted(lengths)]


def test_either_server_may_die_and_come_back(pair: Pair[SageServer]) -> None:
    for server in (pair.prefill, pair.decode):
        server.kill()
        with pytest.raises(requests.RequestException):
            generate(pair, SHORT_PROMPT)
        server.__enter__()
        assert generate(pair, SHORT_PROMPT)["meta_info"]["completion_tokens"] == 4


def says_what_one_server_says(pair: Pair[SageServer], stock: Stock) -> None:
    """Though requests leave its decode server."""
    num_different, largest = differences(stock.answers, ask(pair, ASKED, 24))
    assert num_different == 0
    assert largest < 1e-4
    all_came_back(pair)


def all_came_back(pair: Pair[SageServer]) -> None:
    states = requests.get(f"{pair.url}/server_info", timeout=300).json()["internal_states"]
    assert {state["sage"]["num_policy_errors"] for state in states} == {0}
    moved = pair.decode.stats()["preemption"]
    assert moved["num_resumed"] == moved["num_preemptions"] > 0
    assert moved["num_not_preemptible"] == {}


def test_two_ranks_each(
    model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ("--tp-size", "2")
    with pair_of(
        model, tmp_path_factory, {"prefill": flags, "decode": flags}, lambda _: TWO_RANKS
    ) as pair:
        says_what_one_server_says(pair, stock)


def test_a_decode_server_with_a_radix_cache(
    model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = {"decode": ("--disaggregation-decode-enable-radix-cache",)}
    with pair_of(model, tmp_path_factory, flags) as pair:
        says_what_one_server_says(pair, stock)
        says_what_one_server_says(pair, stock)


def test_a_batch_has_room_for_one_adapter(
    model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [f"{name}={adapter(folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    flags = ["--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "1"]
    flags += ["--lora-paths", *paths]
    both = {"prefill": flags, "decode": flags}
    with pair_of(model, tmp_path_factory, both, torch_kernels.install) as pair:
        asked = [
            partial(answer, pair, i, lora_path=ADAPTERS[i % len(ADAPTERS)])
            for i in range(len(ASKED))
        ]
        alone = [call() for call in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            together = [pool.submit(call) for call in asked]
            assert [call.result() for call in together] == alone
        assert all(ids != said.ids for ids, said in zip(alone, stock.answers, strict=True))
        all_came_back(pair)
