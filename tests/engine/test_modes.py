"""Ways to run SGLang that few tests use (modes.toml): answers stay the same if requests are
preempted, or none is preempted and the order counts."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from bench.engines.server.model import write_model
from tests.checks.exactness import TWO_RANKS, Answering
from tests.engine import stage, torch_kernels
from tests.engine.architectures import PICTURE, with_convolutions, with_pictures, with_windows
from tests.engine.conftest import ASKED, Stock
from tests.engine.kinds import CHECKED, PATIENT, YIELDING, YIELDING_FLAGS
from tests.engine.kinds import settings as switch
from tests.engine.serving import (
    UNASKED_LONG_PROMPT,
    UNASKED_SHORT_PROMPT,
    SageServer,
    generate,
    post,
    states,
    wait_until,
)

NUM_ASKED, NUM_OF_GROUP = 16, 12
ADAPTERS = ("first", "second")
_RANK, _HIDDEN_SIZE = 4, 128


def preempting(
    folder: Path,
    model: Path,
    flags: Sequence[str],
    env: Mapping[str, str] = CHECKED,
    settings: str = YIELDING,
) -> SageServer:
    settings = f"{PATIENT}{settings}"
    return SageServer(model, folder, flags=flags, env=env, settings=settings, policy="fastserve")


def answer(server: Answering, i: int, **more: Any) -> list[int]:
    """The answer to a prompt of ASKED, in token ids."""
    prompt, num_tokens = ASKED[i]
    sampling = {"ignore_eos": True}
    said = generate(server, prompt, num_tokens, sampling_params=sampling, **more)
    ids: list[int] = said["output_ids"]
    return ids


def all_yield_and_come_back(
    server: SageServer, bodies: Sequence[Mapping[str, Any]] = ({},)
) -> list[list[int]]:
    """Preempted answers equal those given one by one. `bodies` join their requests, in turn."""
    asked = [(i, bodies[i % len(bodies)]) for i in range(NUM_ASKED)]
    alone = [answer(server, i, **body) for i, body in asked]
    assert (
        stage.together(server, [partial(answer, server, i, **body) for i, body in asked]) == alone
    )
    stats = server.stats()["preemption"]
    assert stats["num_preemptions"] == stats["num_resumed"] >= NUM_ASKED
    assert stats["num_not_preemptible"] == {}
    return alone


def picture(color: int) -> str:
    """A PNG of one color, in base64."""
    file = io.BytesIO()
    Image.new("RGB", (56, 84), (color % 256, 255 - color % 256, 99)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def the_shorter_starts_first(server: SageServer) -> None:
    prompts = {"long": UNASKED_LONG_PROMPT, "short": UNASKED_SHORT_PROMPT}
    calls = [partial(generate, server, prompt, rid=rid) for rid, prompt in prompts.items()]
    stage.together(server, calls)
    assert stage.started(server) == ["short", "long"]


@pytest.mark.long
def test_a_hierarchical_cache_takes_what_leaves_the_device(model: Path, tmp_path: Path) -> None:
    flags = [*YIELDING_FLAGS, "--enable-hierarchical-cache", "--hicache-ratio", "1.5"]
    costly = YIELDING.replace("prefill_token_ms = 0.0", "prefill_token_ms = 1.0")
    with preempting(tmp_path, model, flags, settings=costly) as server:
        alone = all_yield_and_come_back(server)
        assert 320 <= server.stats()["preemption"]["host_pool_tokens"] < 330
        # Aborted, they give their copies' memory back: kept, these would leave room for no other.
        calls = [partial(answer, server, i) for i in range(NUM_ASKED)]
        for _ in range(5):
            stage.together(server, calls, then=partial(abort_swapped, server), swapped=4)
        num_preemptions = server.stats()["preemption"]["num_preemptions"]
        assert stage.together(server, calls) == alone
        assert server.stats()["preemption"]["num_preemptions"] >= num_preemptions + NUM_ASKED
        # Evicted tokens come back from host memory, and go before uncached prompts.
        switch(server, {"schedule_policy": "sage"})
        kept, first, second, new = ([100 * i + j for j in range(300)] for i in range(1, 5))
        said = answer_to(server, kept, "said")
        for others in (first, second):
            answer_to(server, others, f"{others[0]}")
        calls = [partial(answer_to, server, new, "new"), partial(answer_to, server, kept, "again")]
        _, again = stage.together(server, calls)
        assert stage.started(server) == ["again", "new"]
        assert again["output_ids"] == said["output_ids"]
        assert again["meta_info"]["cached_tokens_details"]["host"] > 200


@pytest.mark.long
def test_storage_behind_host_memory(model: Path, tmp_path: Path) -> None:
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", "1.5", "--page-size", "16"]
    flags += ["--hicache-storage-backend", "file", "--hicache-write-policy", "write_through"]
    flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "written")}
    none_yields_but_the_shorter_starts_first(tmp_path, model, env, flags, then=read_back)


def read_back(server: SageServer) -> None:
    """A prompt of which neither the device nor host memory has anything any more."""
    prompt = [*range(100, 400)]
    said = answer_to(server, prompt, "said")

    def is_read() -> bool:
        post(server, "/flush_cache")
        again = answer_to(server, prompt, "again")
        assert again["output_ids"] == said["output_ids"]
        found = again["meta_info"]["cached_tokens_details"] or {"storage": 0}
        return bool(found["storage"] >= 272)

    wait_until(is_read)  # it has to be written first


def abort_swapped(server: SageServer, state: Mapping[str, Any]) -> None:
    for rid in state["swapped"]:
        post(server, "/abort_request", {"rid": rid})
    stage.once_aborted(server, len(state["swapped"]))


def answer_to(server: SageServer, ids: Sequence[int], rid: str) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 4}
    body = {"input_ids": ids, "rid": rid, "sampling_params": sampling}
    found: dict[str, Any] = post(server, "/generate", body)
    return found


def test_eight_bit_kv_experts_prefill_intervals_and_tree_sessions(tmp_path: Path) -> None:
    model = write_model(tmp_path / "mixtral", hidden_size=_HIDDEN_SIZE, num_experts=4)
    flags = [*YIELDING_FLAGS, "--kv-cache-dtype", "fp8_e5m2", "--prefill-decode-interval", "2"]
    flags += ["--tp-size", "2", "--ep-size", "2", "--enable-session-radix-cache"]
    sessions: list[dict[str, Any]] = [{}, {"session_id": "one"}, {"session_id": "other"}]
    env = CHECKED | TWO_RANKS | torch_kernels.install(tmp_path)
    with preempting(tmp_path, model, flags, env) as server:
        all_yield_and_come_back(server, sessions)


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


def test_a_batch_has_room_for_one_adapter(model: Path, stock: Stock, tmp_path: Path) -> None:
    paths = [f"{name}={adapter(tmp_path / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    flags = [*YIELDING_FLAGS, "--enable-lora", "--lora-backend", "torch_native"]
    flags += ["--max-loras-per-batch", "1", "--lora-paths", *paths]
    env = CHECKED | torch_kernels.install(tmp_path)
    with preempting(tmp_path, model, flags, env) as server:
        bodies = [{"lora_path": name} for name in ADAPTERS]
        found = all_yield_and_come_back(server, bodies)
        assert all(ids != said.ids for ids, said in zip(found, stock.answers, strict=False))


def variant(
    folder: Path, config: Mapping[str, Any], norms: Mapping[str, torch.Tensor], **shape: int
) -> Path:
    """A Llama of another kind. norms: by what each layer calls it."""
    model = write_model(folder / "variant", hidden_size=_HIDDEN_SIZE, **shape)
    file, weights_file = model / "config.json", model / "model.safetensors"
    known = json.loads(file.read_text()) | config
    file.write_text(json.dumps(known))
    added = {
        f"model.layers.{i}.{name}.weight": norm.clone()
        for i in range(known["num_hidden_layers"])
        for name, norm in norms.items()
    }
    save_file(load_file(weights_file) | added, weights_file, metadata={"format": "pt"})
    return model


# A window of 16 tokens in the first layer.
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 16,
    "query_pre_attn_scalar": 32, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "final_logit_softcapping": None,
}  # fmt: skip


def test_a_sliding_window_whose_kv_is_kept_whole(tmp_path: Path) -> None:
    plain = torch.zeros(_HIDDEN_SIZE)
    norms = dict.fromkeys(("input_layernorm", "pre_feedforward_layernorm"), plain)
    # Layers outweigh the embedding of the last token.
    norms |= dict.fromkeys(("post_attention_layernorm", "post_feedforward_layernorm"), plain + 20)
    with preempting(tmp_path, variant(tmp_path, GEMMA, norms), YIELDING_FLAGS) as server:
        found = all_yield_and_come_back(server)
        assert len({token for ids in found for token in ids}) > NUM_ASKED


@pytest.mark.long
@pytest.mark.parametrize("make", [with_windows, with_convolutions])
def test_models_whose_answers_are_not_preempted(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    none_yields_but_the_shorter_starts_first(tmp_path, make(tmp_path / "model"))


def none_yields_but_the_shorter_starts_first(
    folder: Path,
    model: Path,
    env: Mapping[str, str] = {},
    flags: Sequence[str] = (),
    then: Callable[[SageServer], None] = lambda server: None,
) -> None:
    """And answers are the same beside others, though memory runs out. then: what comes after."""
    env = CHECKED | torch_kernels.install(folder) | {**env}
    flags = [*YIELDING_FLAGS, *flags]
    with SageServer(model, folder, flags=flags, env=env, settings=PATIENT) as server:
        the_shorter_starts_first(server)
        asked = [partial(answer, server, i) for i in range(NUM_ASKED)]
        alone = [ask() for ask in asked]
        assert stage.together(server, asked) == alone
        assert len({token for ids in alone for token in ids}) > NUM_ASKED
        then(server)
        stats = server.stats()
        assert (stats["preemption"], stats["num_policy_errors"]) == (None, 0)


@pytest.mark.long
def test_pictures_in_prompts(tmp_path: Path) -> None:
    def body(i: int, color: int) -> dict[str, Any]:
        return {"text": f"{PICTURE}{ASKED[i][0]}", "image_data": picture(color)}

    model = with_pictures(tmp_path / "model")
    flags = [*YIELDING_FLAGS, "--mm-attention-backend", "sdpa"]
    env = CHECKED | torch_kernels.install(tmp_path)
    with preempting(tmp_path, model, flags, env) as server:
        # Every second prompt has a picture, which changes the answer.
        with_picture = range(1, NUM_ASKED, 2)
        bodies = [body(i, 16 * i) if i in with_picture else {} for i in range(NUM_ASKED)]
        found = all_yield_and_come_back(server, bodies)
        for i in with_picture:
            assert answer(server, i, **body(i, 16 * i + 128)) != found[i]
        # Chats with a picture are ordered by their text.
        switch(server, {"schedule_policy": "sage"})
        asked = {"long": UNASKED_LONG_PROMPT, "short": UNASKED_SHORT_PROMPT}
        stage.together(server, [partial(chat, server, rid, text) for rid, text in asked.items()])
        assert stage.started(server) == ["short", "long"]


def chat(server: SageServer, rid: str, text: str) -> None:
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(0)}"}}
    messages = [{"role": "user", "content": [shown, {"type": "text", "text": text}]}]
    body = {"model": "model", "rid": rid, "max_tokens": 4, "messages": messages}
    post(server, "/v1/chat/completions", body)


@pytest.mark.long
def test_prompts_of_embeddings_are_served_and_stay(model: Path, tmp_path: Path) -> None:
    # SGLang reads them as bfloat16.
    flags = [*YIELDING_FLAGS, "--disable-radix-cache", "--dtype", "bfloat16"]
    vectors = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    prompts = [[100 * i + j for j in range(30)] for i in range(NUM_ASKED)]
    given = [{"text": None, "input_embeds": vectors[ids].tolist()} for ids in prompts]
    with preempting(tmp_path, model, flags) as server:
        for i, ids in enumerate(prompts):
            assert answer(server, i, **given[i]) == answer(server, i, text=None, input_ids=ids)
        # Both kinds in one prefill would end SGLang.
        given[::2] = [{"text": None, "input_ids": ids} for ids in prompts[::2]]
        calls = [partial(answer, server, i, **body) for i, body in enumerate(given)]
        said = stage.together(server, calls)
        assert [len(ids) for ids in said] == [num_tokens for _, num_tokens in ASKED[:NUM_ASKED]]
        stats = server.stats()
        assert stats["preemption"]["num_preemptions"] == stats["preemption"]["num_resumed"] > 0
        assert stats["num_policy_errors"] == 0
        assert set(stats["preemption"]["num_not_preemptible"]) == {"input_embeds"}


@pytest.mark.long  # four ranks take every step together, and wait busily
def test_each_attention_group_decides_for_itself_and_its_ranks_alike(tmp_path: Path) -> None:
    flags = ["--tp-size", "4", "--dp-size", "2", "--enable-dp-attention"]
    flags += ["--max-total-tokens", "640", "--max-running-requests", "12"]
    env = CHECKED | TWO_RANKS | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}
    env |= torch_kernels.install(tmp_path)
    # SGLang's Llama has no DP attention.
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    head = torch.ones(_HIDDEN_SIZE // 4)
    norms = {"self_attn.q_norm": head, "self_attn.k_norm": head}
    model = variant(tmp_path, config, norms, num_kv_heads=4)
    with preempting(tmp_path, model, flags, env) as server:

        def of(i: int, group: int) -> list[int]:
            return answer(server, i, routed_dp_rank=group)

        def num_preemptions() -> list[int]:
            found = [state["sage"]["preemption"] for state in states(server)]
            assert all(each["num_preemptions"] == each["num_resumed"] for each in found)
            return sorted(each["num_preemptions"] for each in found)

        alone = [of(i, i % 2) for i in range(NUM_OF_GROUP)]
        with ThreadPoolExecutor(NUM_OF_GROUP) as pool:
            # All of one group: the other one takes the same steps, and decides nothing.
            assert list(pool.map(of, range(NUM_OF_GROUP), [1] * NUM_OF_GROUP)) == alone
            none, some = num_preemptions()
            assert none == 0 < some
            assert list(pool.map(of, range(NUM_OF_GROUP), [0] * NUM_OF_GROUP)) == alone
            assert min(num_preemptions()) > 0
