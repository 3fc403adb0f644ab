"""Counts of tokens continue after a swap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_params import SamplingParams

from patches.scheduler.penalties import count_again

KINDS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}
SAID = ([5, 5, 6], [], [7], [9, 9, 9, 2], [5])
SAMPLING: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 3},
    {},
)


class Batch(SimpleNamespace):
    """The attributes of SGLang's batch that our code reads."""


def batch(said: tuple[list[int], ...], sampling: tuple[dict[str, Any], ...], **more: Any) -> Batch:
    ends = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    reqs = [
        SimpleNamespace(
            sampling_params=SamplingParams(stop_token_ids=[1], **params), output_ids=ids,
            origin_input_ids=[3, 4], eos_token_ids={2}, tokenizer=ends,
        )
        for ids, params in zip(said, sampling, strict=True)
    ]  # fmt: skip
    mode = SimpleNamespace(is_prebuilt=lambda: more.get("prebuilt", False))
    overlap = more.get("overlap", False)
    return Batch(reqs=reqs, device="cpu", enable_overlap=overlap, forward_mode=mode)


def counted(of: Batch) -> Any:
    return penaltylib.BatchedPenalizerOrchestrator(vocab_size=12, batch=of, penalizers=KINDS)


def penalized(counts: Any, num_rows: int) -> torch.Tensor:
    logits = torch.ones(num_rows, 12)
    counts.apply(logits)
    return logits


@pytest.mark.parametrize("turn", range(len(SAMPLING)))
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, lambda ids: ids),
        ({"prebuilt": True}, lambda ids: ids[:-1]),  # the next step counts the newest
        ({"overlap": True}, lambda ids: ids and [4, *ids[:-1]]),  # SGLang is a token behind
    ],
)
def test_each_request_goes_on_with_its_own_counts(
    turn: int, facts: dict[str, bool], expected: Any
) -> None:
    sampling = SAMPLING[turn:] + SAMPLING[:turn]
    whole = batch(SAID, sampling, **facts)
    info = SimpleNamespace(penalizer_orchestrator=counted(whole))
    count_again(info, whole)
    found = penalized(info.penalizer_orchestrator, len(SAID))
    for row, (ids, params) in enumerate(zip(SAID, sampling, strict=True)):
        alone = batch((ids,), (params,))
        counts = counted(alone)
        for token in expected(ids):
            counts.cumulate_output_tokens(torch.tensor([token]))
        assert torch.equal(found[row], penalized(counts, 1)[0]), (row, params)
