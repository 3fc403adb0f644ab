"""Small models, with random weights, of architectures that bench/engines/server/model.py lacks."""

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
