"""What probes read of the plan language's model at every token of an answer, in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.engines.server.plan_model import plan_words
from bench.workloads.plan_language import MAX_TOKENS, Reader
from predictor_store.probe.probe_file import ProbeFile
from sage_sched.probe.posterior import Reading, is_due
from sage_sched.probe.refining import from_steps, in_steps

# Narrow enough that all lengths of a bin are alike.
_EXACT_EDGES = np.unique([0, *np.rint(np.geomspace(1, MAX_TOKENS, 80)).astype(int)])


def exact_reading() -> Reading:
    """How exact_scores are to be read: as they are, forecast by the prompt and all."""
    base = np.log(np.diff(_EXACT_EDGES) / MAX_TOKENS)
    return Reading(_EXACT_EDGES, np.array([0]), base[None], alpha=0.0, beta=np.ones(1), gamma=0.0)


def exact_scores(row: dict[str, Any]) -> dict[int, NDArray[np.float64]]:
    """What the exact filter knows of an answer, at the ages at which scores are of use: no probe
    can know more."""
    reader, found = Reader(plan_words(), row["kind"]), {}
    for age, token in enumerate(row["tokens"]):
        if is_due(age):
            below = np.cumsum(np.append(0.0, reader.remaining()[1:]))
            chance = np.maximum(np.diff(below[_EXACT_EDGES]), 1e-9)
            found[age] = np.log(chance / chance.sum())
        reader.read(token)
    return found


def read_answers(
    model: Path, rows: Sequence[dict[str, Any]], probes: Sequence[ProbeFile]
) -> Iterator[list[NDArray[np.float64]]]:
    """Of each row (bench.engines.server.plan_model's answers) and probe: ln P by bin at every age
    of the answer, from 0, as they would travel; shape (tokens, bins).

    The same states as on a server, whose answers are forced to these tokens: the pass over prompt
    and answer shows at the prompt's last token that at age 0, and so on.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    llama = LlamaForCausalLM.from_pretrained(model).eval()
    for row in rows:
        asked = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([asked + row["tokens"][:-1]])
        with torch.no_grad():
            states = llama(input_ids=ids, output_hidden_states=True).hidden_states
        read = []
        for probe in probes:
            # The first of the states are the embeddings.
            seen = states[probe.layer + 1][0, len(asked) - 1 :].numpy()
            read.append(from_steps(in_steps(probe.log_p(seen))))
        yield read
