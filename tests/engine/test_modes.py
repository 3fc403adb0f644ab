"""Ways to run SGLang that few tests use (modes.toml): answers stay the same if requests are
preempted, or none is preempted and the order counts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from bench.engines.server.model import write_model
from tests.checks.exactness import TWO_RANKS, Answering
from tests.engine import stage, torch_kernels
from tests.engine.architectures import PICTURE, with_pictures, write_architecture
from tests.engine.conftest import ASKED, Stock
from tests.engine.crowds import LONG_AND_SHORT, started
from tests.engine.kinds import YIELDING, YIELDING_FLAGS
from tests.engine.kinds import settings as switch
from tests.engine.serving import CHECKED, SageServer, generate, post, states, wait_until

NUM_ASKED, NUM_OF_GROUP = 16, 12
ADAPTERS = ("first", "second")
_RANK, _HIDDEN_SIZE = 4, 128
Answers = list[list[int]]


def answer(server: Answering, i: int, **more: Any) -> list[int]:
    """The answer to a prompt of ASKED, in token ids."""
    prompt, num_tokens = ASKED[i]
    sampling = {"ignore_eos": True}
    said = generate(server, prompt, num_tokens, sampling_params=sampling, **more)
    ids: list[int] = said["output_ids"]
    return ids


def answers_stay(
    server: SageServer, bodies: Sequence[Mapping[str, Any]] = ({},), *, preempts: bool = True
) -> Answers:
    """Check that requests get the same answers together, though memory runs out, as one by one.
    Either all yield and come back, or none does and the shorter starts first. `bodies` join them,
    in turn."""
    if not preempts:
        assert started(server, LONG_AND_SHORT) == ["short", "long"]
    asked = [partial(answer, server, i, **bodies[i % len(bodies)]) for i in range(NUM_ASKED)]
    alone = [ask() for ask in asked]
    assert stage.together(server, asked) == alone
    moved = server.stats()["preemption"]
    assert (moved is not None) == preempts
    if preempts:
        assert moved["num_preemptions"] == moved["num_resumed"] >= NUM_ASKED
        assert moved["num_not_preemptible"] == {}
    return alone


def abort_swapped(server: SageServer, state: Mapping[str, Any]) -> None:
    for rid in state["swapped"]:
        post(server, "/abort_request", {"rid": rid})
    stage.once(server, num_aborts=len(state["swapped"]))


def host_memory_takes_what_leaves_the_device(server: SageServer, alone: Answers) -> None:
    assert 320 <= server.stats()["preemption"]["host_pool_tokens"] < 330
    # Aborted requests release their copies, which would fill host memory otherwise.
    calls = [partial(answer, server, i) for i in range(NUM_ASKED)]
    for _ in range(5):
        stage.together(server, calls, then=partial(abort_swapped, server), swapped=4)
    num_preemptions = server.stats()["preemption"]["num_preemptions"]
    assert stage.together(server, calls) == alone
    assert server.stats()["preemption"]["num_preemptions"] >= num_preemptions + NUM_ASKED
    # Evicted tokens come back from host memory, and go before uncached prompts.
    switch(server, {"schedule_policy": "sage"})
    kept, first, second, new = ([100 * i + j for j in range(300)] for i in range(1, 5))
    said = generate(server, None, input_ids=kept, rid="said")
    for others in (first, second):
        generate(server, None, input_ids=others, rid=f"{others[0]}")
    ask = partial(generate, server, None)
    calls = [partial(ask, input_ids=new, rid="new"), partial(ask, input_ids=kept, rid="again")]
    _, again = stage.together(server, calls)
    assert stage.state(server)["started"] == ["again", "new"]
    assert again["output_ids"] == said["output_ids"]
    assert again["meta_info"]["cached_tokens_details"]["host"] > 200


def storage_is_read(server: SageServer, alone: Answers) -> None:
    """Check that storage serves a prompt that is no longer on the device or in host memory."""
    prompt = [*range(100, 400)]
    said = generate(server, None, input_ids=prompt, rid="said")

    def is_read() -> bool:
        post(server, "/flush_cache")
        again = generate(server, None, input_ids=prompt, rid="again")
        assert again["output_ids"] == said["output_ids"]
        found = again["meta_info"]["cached_tokens_details"] or {"storage": 0}
        return bool(found["storage"] >= 272)

    wait_until(is_read)  # it has to be written first


def answers_go_by_the_kv(server: SageServer, alone: Answers) -> None:
    assert len({token for ids in alone for token in ids}) > NUM_ASKED


class Mode(NamedTuple):
    """A way to run a server. make: makes its model in a folder; None: a plain model. bodies: join
    its requests, in turn. then: a further check, which gets the answers."""

    flags: str
    preempts: bool = True
    make: Callable[[Path], Path] | None = None
    env: Mapping[str, str] = {}
    settings: str = YIELDING
    bodies: Sequence[Mapping[str, Any]] = ({},)
    then: Callable[[SageServer, Answers], None] = answers_go_by_the_kv


_HOST_MEMORY = "--enable-hierarchical-cache --hicache-ratio 1.5"
MODES = {
    "eight-bit KV, experts, prefill intervals and sessions of the tree": Mode(
        "--kv-cache-dtype fp8_e5m2 --prefill-decode-interval 2 --enable-session-radix-cache "
        "--tp-size 2 --ep-size 2",
        make=partial(write_model, hidden_size=_HIDDEN_SIZE, num_experts=4),
        env=TWO_RANKS,
        bodies=({}, {"session_id": "one"}, {"session_id": "other"}),
    ),
    "a sliding window whose KV is kept whole": Mode(
        "", make=partial(write_architecture, name="Gemma2")
    ),
    "host memory": Mode(
        _HOST_MEMORY,
        settings=YIELDING.replace("prefill_token_ms = 0.0", "prefill_token_ms = 1.0"),
        then=host_memory_takes_what_leaves_the_device,
    ),
    "storage behind it": Mode(
        f"{_HOST_MEMORY} --page-size 16 --hicache-storage-backend file "
        "--hicache-write-policy write_through --hicache-storage-prefetch-policy wait_complete",
        preempts=False,
        then=storage_is_read,
    ),
    "a sliding window with a pool of its own": Mode(
        "", preempts=False, make=partial(write_architecture, name="Gemma4")
    ),
    "convolutions": Mode("", preempts=False, make=partial(write_architecture, name="Lfm2")),
}
_NOT_LONG = [*MODES][:2]


def start(
    folder: Path, model: Path, flags: Sequence[str], env: Mapping[str, str] = {}, **more: Any
) -> SageServer:
    env = CHECKED | torch_kernels.install(folder) | {**env}
    return SageServer(model, folder, flags=[*YIELDING_FLAGS, *flags], env=env, **more)


preempting = partial(start, settings=YIELDING, policy="fastserve")


@pytest.mark.parametrize(
    "name", [*_NOT_LONG, *(pytest.param(name, marks=pytest.mark.long) for name in [*MODES][2:])]
)
def test_answers_stay_the_same(name: str, model: Path, tmp_path: Path) -> None:
    mode = MODES[name]
    model = model if mode.make is None else mode.make(tmp_path / "model")
    storage = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "written")}
    by = {"settings": mode.settings, "policy": "fastserve"} if mode.preempts else {}
    with start(tmp_path, model, mode.flags.split(), {**storage, **mode.env}, **by) as server:
        mode.then(server, answers_stay(server, mode.bodies, preempts=mode.preempts))
        assert server.stats()["num_policy_errors"] == 0


def adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter that changes answers."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir()
    modules = {"q_proj": _HIDDEN_SIZE, "v_proj": _HIDDEN_SIZE // 2}
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": [*modules]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for module, size in modules.items():
        name = f"base_model.model.model.layers.0.self_attn.{module}"
        down = torch.randn(_RANK, _HIDDEN_SIZE, generator=generator)
        up = torch.randn(size, _RANK, generator=generator)
        weights |= {f"{name}.lora_A.weight": down / 10, f"{name}.lora_B.weight": up / 10}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def adapter_flags(folder: Path) -> list[str]:
    """A batch has room for one adapter."""
    paths = [f"{name}={adapter(folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    flags = ["--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "1"]
    return [*flags, "--lora-paths", *paths]


def test_a_batch_has_room_for_one_adapter(model: Path, stock: Stock, tmp_path: Path) -> None:
    with preempting(tmp_path, model, adapter_flags(tmp_path)) as server:
        found = answers_stay(server, [{"lora_path": name} for name in ADAPTERS])
        assert all(ids != said.ids for ids, said in zip(found, stock, strict=False))


def picture(color: int) -> str:
    """A PNG of one color, in base64."""
    file = io.BytesIO()
    Image.new("RGB", (56, 84), (color % 256, 255 - color % 256, 99)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.long
def test_pictures_in_prompts(tmp_path: Path) -> None:
    def body(i: int, color: int) -> dict[str, Any]:
        return {"text": f"{PICTURE}{ASKED[i][0]}", "image_data": picture(color)}

    model = with_pictures(tmp_path / "model")
    with preempting(tmp_path, model, ["--mm-attention-backend", "sdpa"]) as server:
        # Every second prompt has a picture, which changes the answer.
        with_picture = range(1, NUM_ASKED, 2)
        bodies = [body(i, 16 * i) if i in with_picture else {} for i in range(NUM_ASKED)]
        found = answers_stay(server, bodies)
        for i in with_picture:
            assert answer(server, i, **body(i, 16 * i + 128)) != found[i]
        # Chats with a picture are ordered by their text.
        switch(server, {"schedule_policy": "sage"})
        asked = LONG_AND_SHORT.items()
        stage.together(server, [partial(chat, server, rid, **one) for rid, one in asked])
        assert stage.state(server)["started"] == ["short", "long"]


def chat(server: SageServer, rid: str, prompt: str, max_new_tokens: int) -> None:
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(0)}"}}
    messages = [{"role": "user", "content": [shown, {"type": "text", "text": prompt}]}]
    body = {"model": "model", "rid": rid, "max_tokens": max_new_tokens, "messages": messages}
    post(server, "/v1/chat/completions", body)


class Stream(NamedTuple):
    """A streamed answer. ids: by event; each event repeats the earlier ones. num_states: hidden
    states by event."""

    ids: list[list[int]]
    num_states: list[int]
    num_retractions: int


def streamed(server: Answering, num_tokens: int, body: Mapping[str, Any]) -> Stream:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    asked = {**body, "stream": True, "sampling_params": sampling | body.get("sampling_params", {})}
    got = requests.post(f"{server.url}/generate", json=asked, stream=True, timeout=300)
    lines = [line.partition(b"data: ")[2] for line in got.iter_lines()]
    events = [json.loads(line) for line in lines if line not in (b"", b"[DONE]")]
    about = [event["meta_info"] for event in events]
    num_states = [sum(map(len, each["hidden_states"])) for each in about if "hidden_states" in each]
    ids = [event["output_ids"] for event in events]
    return Stream(ids, num_states, about[-1]["num_retractions"])


# Requests that SGLang answers differently after a retraction, or may do so.
PINNED: Mapping[str, Mapping[str, Any]] = {
    "input_embeds": {},
    "return_hidden_states": {"return_hidden_states": True},
    "return_flat_raw_top_logprobs": {
        "return_logprob": True, "top_logprobs_num": 2, "return_flat_raw_top_logprobs": True,
    },
    "return_sampling_mask": {"return_sampling_mask": True, "sampling_params": {"top_k": 1}},
}  # fmt: skip


def ends_in_a_pause(server: SageServer, body: Mapping[str, Any]) -> None:
    """Check that a pause, which takes all memory, ends a stream that would begin anew with an
    error."""
    asked = {**body, "stream": True, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    with requests.post(f"{server.url}/generate", json=asked, stream=True, timeout=300) as got:
        lines = (line for line in got.iter_lines() if line)
        next(lines)
        post(server, "/pause_generation", {"mode": "retract"})
        post(server, "/continue_generation", {})
        assert b"paused" in [*lines][-2]  # before the end's mark


def test_streams_that_a_retraction_would_change_stay(model: Path, tmp_path: Path) -> None:
    # SGLang reads embeddings as bfloat16.
    flags = ["--disable-radix-cache", "--dtype", "bfloat16", "--enable-return-hidden-states"]
    vectors = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    kinds = [*PINNED, "none"] * 4
    bodies = []
    for i, kind in enumerate(kinds):
        ids = [100 * i + j for j in range(30)]
        given = {"input_embeds": vectors[ids].tolist()} if i % 5 == 0 else {"input_ids": ids}
        bodies.append({**given, **PINNED.get(kind, {})})
    with preempting(tmp_path, model, flags) as server:
        alone = [streamed(server, 60 + i, body) for i, body in enumerate(bodies)]
        assert [len(each.ids[-1]) for each in alone] == [60 + i for i in range(len(bodies))]
        calls = [partial(streamed, server, 60 + i, body) for i, body in enumerate(bodies)]
        swaps = 0
        for swapping in (True, False):
            switch(server, {"preemption": {"enabled": swapping}})
            found = stage.together(server, calls)
            left = {kind for kind, each in zip(kinds, found, strict=True) if each[2]}
            assert left <= {"none", *(["return_hidden_states"] if swapping else [])}
            for kind, one, other in zip(kinds, alone, found, strict=True):
                # Without swaps its KV is computed again, and in bfloat16 rounded differently.
                if swapping or kind not in left:
                    assert other.ids[-1] == one.ids[-1], kind
                assert all(b[: len(a)] == a for a, b in pairwise(other.ids)), kind
                assert other.num_states[-1:] == one.num_states[-1:], kind
            swaps = server.stats()["preemption"]["num_preemptions"] - swaps
            assert (swaps > 0) == swapping
        ends_in_a_pause(server, bodies[0])
        assert server.stats()["num_policy_errors"] == 0


@pytest.mark.long  # four ranks take every step together, and wait busily
def test_each_attention_group_decides_for_itself_and_its_ranks_alike(tmp_path: Path) -> None:
    flags = ["--tp-size", "4", "--dp-size", "2", "--enable-dp-attention"]
    flags += ["--max-running-requests", "12"]
    env = TWO_RANKS | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}
    # SGLang's Llama has no DP attention.
    model = write_architecture(tmp_path / "model", "Qwen3")
    with preempting(tmp_path, model, flags, env) as server:

        def of(i: int, group: int) -> list[int]:
            return answer(server, i, routed_dp_rank=group)

        def num_preemptions() -> list[int]:
            found = [state["sage"]["preemption"] for state in states(server)]
            assert all(each["num_preemptions"] == each["num_resumed"] for each in found)
            return sorted(each["num_preemptions"] for each in found)

        alone = [of(i, i % 2) for i in range(NUM_OF_GROUP)]
        with ThreadPoolExecutor(NUM_OF_GROUP) as pool:
            # All are in one group. The other one takes the same steps, and decides nothing.
            assert list(pool.map(of, range(NUM_OF_GROUP), [1] * NUM_OF_GROUP)) == alone
            none, some = num_preemptions()
            assert none == 0 < some
            assert list(pool.map(of, range(NUM_OF_GROUP), [0] * NUM_OF_GROUP)) == alone
            assert min(num_preemptions()) > 0
