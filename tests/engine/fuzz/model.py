"""The served model. Each token is a few printable characters, so that grammars, stop strings and
streams of random text make sense."""

from __future__ import annotations

import itertools
import string
from pathlib import Path

from bench.engines.server.model import END_TOKEN, PAD_TOKEN, save_tokenizer, write_model

VOCAB_SIZE = 512
_SPECIAL = (PAD_TOKEN, "[UNK]", "[CLS]", END_TOKEN, "<|user|>", "<|assistant|>")
# Prompts are made of these tokens, one character each. An answer has the others too.
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
FIRST_ID = len(_SPECIAL)


def write_spelling_model(folder: Path) -> Path:
    """Write the model, unless it exists, and return folder."""
    write_model(folder, vocab_size=VOCAB_SIZE)
    if not (folder / "spelling").exists():
        _write_tokenizer(folder)
        (folder / "spelling").touch()  # last, so that an incomplete folder is written again
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    syllables = map(
        "".join, itertools.product("bcdfghklmnprst", string.ascii_lowercase[:9], "aeiou")
    )
    vocab = [*_SPECIAL, *CHARACTERS.replace(" ", "Ġ"), *syllables][:VOCAB_SIZE]
    assert len(set(vocab)) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    )
    save_tokenizer(tokenizer, folder, 4096, chat_template)
