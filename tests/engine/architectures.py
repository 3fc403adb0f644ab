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
_OWN: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 32, "num_key_value_heads": 4},
    # A short convolution, then attention.
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    # A sliding window, then full attention, in one pool.
    "Gemma2": {
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
        "final_logit_softcapping": None, "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    # The same, in two pools. SGLang asks for swa_..., as the published models' configuration has.
    "Gemma4": {
        "head_dim": 32, "global_head_dim": 32, "sliding_window": 16, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
        "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_v_head_dim": 32,
    },
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


def write_architecture(folder: Path, name: str) -> Path:
    """Write a model of the name that transformers has for it, and return folder."""
    define_missing()
    import transformers as hf

    write_model(folder, weights=False)
    of_answers = getattr(hf, f"{name}ForCausalLM")
    vocab_size = len(hf.AutoTokenizer.from_pretrained(folder))
    config = of_answers.config_class(**_SHAPE | _OWN[name], vocab_size=vocab_size, dtype="float32")
    _write(of_answers(config), folder)
    return folder


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
        elif "post_" in name and model.config.tie_word_embeddings:
            weights.data += 20  # the layers' part counts for more than the last token
    model.save_pretrained(folder)
