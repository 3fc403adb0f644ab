"""Small models of architectures that bench/engines/server/model.py does not write, with random
weights: drawn as it draws them, by the classes that transformers has for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.engines.server.model import write_model
from predictor_store.torchvision_schemas import define_missing

_SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "tie_word_embeddings": False,
}  # fmt: skip
# SGLang asks for in_chans, as the published model names it.
_VISION = {"depth": 1, "embed_dim": 64, "num_heads": 2, "hidden_size": 128, "in_chans": 3}
# Where a picture is in a prompt.
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
ENCODED_PICTURE = "<|image|>"  # of with_cross_attention
_ABOUT_PICTURES = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '" + PICTURE + "' }}"
    "{% endfor %}{% endfor %}"
)


def with_pictures(folder: Path) -> Path:
    """A Qwen2-VL."""
    define_missing()
    import transformers as hf

    write_model(folder, weights=False)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    added = {"additional_special_tokens": _ABOUT_PICTURES}
    tokenizer.add_special_tokens(added, replace_extra_special_tokens=False)
    start, end, image, video = tokenizer.convert_tokens_to_ids(_ABOUT_PICTURES)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = hf.Qwen2VLConfig(
        text_config=_SHAPE | {"vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config=_VISION,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        dtype="float32",
    )
    _write(hf.Qwen2VLForConditionalGeneration(config), folder)
    reads = hf.Qwen2VLImageProcessor(), tokenizer, hf.Qwen2VLVideoProcessor()
    hf.Qwen2VLProcessor(*reads, chat_template=_TEMPLATE).save_pretrained(folder)
    return folder


def with_convolutions(folder: Path) -> Path:
    """An LFM2: a short convolution, then attention."""
    define_missing()
    import transformers as hf

    write_model(folder, weights=False)
    vocab = len(hf.AutoTokenizer.from_pretrained(folder))
    config = hf.Lfm2Config(
        **_SHAPE,
        vocab_size=vocab,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        dtype="float32",
    )
    _write(hf.Lfm2ForCausalLM(config), folder)
    return folder


def with_windows(folder: Path) -> Path:
    """A Gemma 4: a sliding window, then full attention."""
    define_missing()
    import transformers as hf

    write_model(folder, weights=False)
    config = hf.Gemma4TextConfig(
        **_SHAPE | {"tie_word_embeddings": True},
        vocab_size=len(hf.AutoTokenizer.from_pretrained(folder)),
        layer_types=["sliding_attention", "full_attention"],
        head_dim=32,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        sliding_window=16,
        # SGLang asks for these, which the published models' configuration has.
        swa_num_key_value_heads=_SHAPE["num_key_value_heads"],
        swa_head_dim=32,
        swa_v_head_dim=32,
        dtype="float32",
    )
    model = hf.Gemma4ForCausalLM(config)
    for name, weights in model.named_parameters():
        if "post_" in name:  # what layers add counts for more than the token that was said
            weights.data += 20
    _write(model, folder)
    return folder


def with_state_spaces(folder: Path) -> Path:
    """A Falcon-H1: Mamba-2 and attention in each layer."""
    define_missing()
    import transformers as hf

    write_model(folder, weights=False)
    config = hf.FalconH1Config(
        **_SHAPE | {"num_hidden_layers": 1},
        vocab_size=len(hf.AutoTokenizer.from_pretrained(folder)),
        head_dim=32,
        mamba_d_ssm=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_chunk_size=16,
        dtype="float32",
    )
    _write(hf.FalconH1ForCausalLM(config), folder)
    return folder


def with_gated_delta(folder: Path) -> Path:
    """A Qwen3-Next: gated delta, then attention, each with experts."""
    define_missing()
    import transformers as hf

    write_model(folder, weights=False)
    config = hf.Qwen3NextConfig(
        **_SHAPE,
        vocab_size=len(hf.AutoTokenizer.from_pretrained(folder)),
        layer_types=["linear_attention", "full_attention"],
        full_attention_interval=2,  # what SGLang reads instead
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        dtype="float32",
    )
    _write(hf.Qwen3NextForCausalLM(config), folder)
    return folder


def with_cross_attention(folder: Path) -> Path:
    """A Llama 3.2 Vision: self-attention and cross-attention to a picture."""
    define_missing()
    import transformers as hf

    write_model(folder, weights=False)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [ENCODED_PICTURE]})
    text = hf.MllamaTextConfig(
        **_SHAPE,
        vocab_size=len(tokenizer),
        cross_attention_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    vision = hf.MllamaVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_global_layers=1,
        attention_heads=2, image_size=56, max_num_tiles=1, supported_aspect_ratios=[[1, 1]],
        intermediate_layers_indices=[0], vision_output_dim=128,
    )  # fmt: skip
    image = tokenizer.convert_tokens_to_ids(ENCODED_PICTURE)
    parts = {"vision_config": vision, "text_config": text}
    config = hf.MllamaConfig(**parts, image_token_index=image, dtype="float32")
    model = hf.MllamaForConditionalGeneration(config)
    for name, weights in model.named_parameters():
        if name.endswith("_gate"):  # closed at first, so that pictures would not count
            weights.data += 1
    _write(model, folder)
    reads = hf.MllamaImageProcessor(size={"height": 56, "width": 56}, max_image_tiles=1)
    hf.MllamaProcessor(reads, tokenizer).save_pretrained(folder)
    return folder


def _write(model: Any, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, weights in model.named_parameters():
        if weights.ndim > 1:
            gain = 2.0 if "self_attn" in name else 1.0
            gain = {"embed_tokens": _SHAPE["hidden_size"] ** 0.5, "lm_head": 3.0}.get(
                name.split(".")[-2], gain
            )
            drawn = torch.randn(weights.shape, generator=generator)
            weights.data = drawn * gain / weights[0].numel() ** 0.5
    model.save_pretrained(folder)
