"""Writes a small model without a download: random weights whose tokens depend on the KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictor_store.predict.static_encoder import TOKENIZER_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_TOKEN = "[SEP]"
_WEIGHTS = "model.safetensors"
PAD_TOKEN = "[PAD]"
SPECIAL_TOKENS = (PAD_TOKEN, "[UNK]", "[CLS]", END_TOKEN, "<|user|>", "<|assistant|>")
NUM_SPECIAL_TOKENS = len(SPECIAL_TOKENS)
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + ('assistant' if message['role'] == 'assistant' else 'user') + '|> ' }}"
    "{{ message['content'] }}{{ ' [SEP] ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)


_LATENT = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "model_type": "minicpm3",
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
}


def write_model(
    folder: Path,
    *,
    num_layers: int = 2,
    hidden_size: int = 128,
    intermediate_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 16384,
    context_length: int = 4096,
    dtype: str = "float32",
    seed: int = 0,
    weights: bool = True,
    latent_attention: bool = False,
    num_experts: int = 0,
) -> Path:
    """Write a Llama with its tokenizer to folder and return folder.

    With latent_attention it is a MiniCPM3, whose KV is a latent vector per token (MLA), and which
    needs no kernels of its own. With num_experts it is a Mixtral, each of whose tokens goes to two
    experts.

    It does nothing if folder already holds the model of these arguments. dtype is a torch dtype's
    name. Without weights only the shape is written, for --load-format dummy. That is right for
    speed, but dummy weights repeat a few tokens, independent of the KV cache.
    """
    arguments = {name: value for name, value in locals().items() if name != "folder"}
    stamp = folder / "written_by_bench.json"
    if stamp.exists() and json.loads(stamp.read_text()) == arguments:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    (folder / _WEIGHTS).unlink(missing_ok=True)
    _write_tokenizer(folder, vocab_size, context_length)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context_length,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKENS.index("[CLS]"),
        "eos_token_id": SPECIAL_TOKENS.index(END_TOKEN),
        "pad_token_id": SPECIAL_TOKENS.index(PAD_TOKEN),
        "torch_dtype": dtype,
    }
    if latent_attention:
        config |= _LATENT | {
            "scale_emb": 1.0,
            "scale_depth": num_layers**0.5,
            "dim_model_base": hidden_size,
        }
    if num_experts:
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": num_experts,
            "num_experts_per_tok": 2,
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if weights:
        _write_weights(folder, config, seed)
    # Written last, so that an incomplete folder is written again.
    stamp.write_text(json.dumps(arguments))
    return folder


def _write_tokenizer(folder: Path, vocab_size: int, context_length: int) -> None:
    """Write a WordPiece tokenizer: the embedder's vocabulary, cut to its most frequent vocab_size
    words.

    That vocabulary is ordered by frequency; 16384 of it split English into about as many tokens as
    GPT-2's do. Ids past its end decode to filler words, because their text would otherwise be
    empty.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    source = json.loads(TOKENIZER_FILE.read_text())["model"]["vocab"]
    words = [
        word
        for word in sorted(source, key=source.__getitem__)
        if word not in SPECIAL_TOKENS and not word.startswith("[")
    ]
    vocab = [*SPECIAL_TOKENS, *words][:vocab_size]
    vocab += [f"filler{i}" for i in range(len(vocab), vocab_size)]
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    save_tokenizer(tokenizer, folder, context_length, _CHAT_TEMPLATE)


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, context_length: int, chat_template: str
) -> None:
    """Write a tokenizer with these special tokens in the format of transformers."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def _write_weights(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Write random weights at the scale that keeps activations, and so logits, alive at every
    depth.

    Each matrix is drawn at 1 / sqrt(fan-in); twice that in attention and three times in the head,
    so that the KV cache decides which token comes next.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    hidden = config["hidden_size"]

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return (drawn * gain / columns**0.5).to(dtype)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": matrix(config["vocab_size"], hidden, 3.0),
    }
    attention, norms = _attention_shapes(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in attention.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = matrix(rows, columns, 2.0)
        for name, (rows, columns) in _mlp_shapes(config).items():
            tensors[prefix + name] = matrix(rows, columns, 1.0)
        for name, size in norms.items():
            tensors[f"{prefix}{name}.weight"] = torch.ones(size, dtype=dtype)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def _mlp_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each matrix behind the attention."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    up, down = (inner, hidden), (hidden, inner)
    if config["model_type"] != "mixtral":
        return {"mlp.gate_proj.weight": up, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}
    experts = [f"block_sparse_moe.experts.{i}." for i in range(config["num_local_experts"])]
    matrices = (("w1", up), ("w3", up), ("w2", down))
    return {
        "block_sparse_moe.gate.weight": (config["num_local_experts"], hidden),
        **{f"{expert}{name}.weight": shape for expert in experts for name, shape in matrices},
    }


def _attention_shapes(config: dict[str, Any]) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Return the rows and columns of each projection, and the size of each of a layer's norms."""
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] != "minicpm3":
        kv_size = config["num_key_value_heads"] * head
        projections = {
            "q_proj": (heads * head, hidden),
            "k_proj": (kv_size, hidden),
            "v_proj": (kv_size, hidden),
            "o_proj": (hidden, heads * head),
        }
        return projections, norms
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    projections = {
        "q_a_proj": (query, hidden),
        "q_b_proj": (heads * (nope + rope), query),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_b_proj": (heads * (nope + head), latent),
        "o_proj": (hidden, heads * head),
    }
    own_norms = {"self_attn.q_a_layernorm": query, "self_attn.kv_a_layernorm": latent}
    return projections, norms | own_norms
