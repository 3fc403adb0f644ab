"""Messages to a scheduler, as HTTP processes send them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.io_struct import BaseReq, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from bench.engines.server.model import NUM_SPECIAL_TOKENS
from bench.workloads.forced_length import LENGTH_KEY
from patches.carrier import encode, encode_asked, encode_hints
from patches.messages import SetSettings
from sage_sched.distribution import LengthDistribution
from sage_sched.job import NO_HINTS, Hints

NUM_WORDS = 58
# How long a request waits for its prediction.
_PREDICTED_IN_S = 0.004
# Makes a message for the scheduler, from the time.
Make = Callable[[float], Any]
Script = dict[int, list[Make]]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, with the id `r{number}`.

    shared_tokens: of the beginning of its prompt, which it shares with its family.
    lengths: the observed lengths of its prediction; no prediction if empty.
    carried: other entries of its custom_params. others: other fields of its message.
    """

    number: int
    prompt_tokens: int = 40
    answer_tokens: int = 20
    lengths: Sequence[int] = ()
    family: int = 0
    shared_tokens: int = 0
    hints: Hints = NO_HINTS
    sampling: Mapping[str, Any] = field(default_factory=dict)
    carried: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, now_s: float) -> TokenizedGenerateReqInput:
        rid, came_s = f"r{self.number}", now_s - _PREDICTED_IN_S
        carried = {
            LENGTH_KEY: self.answer_tokens,
            **encode_hints(self.hints),
            **encode_asked(rid, came_s, came_s + _PREDICTED_IN_S / 2),
        }
        if self.lengths:
            carried |= encode(LengthDistribution.from_samples([*self.lengths], "history"))
        carried |= self.carried
        sampling = SamplingParams(
            **{"max_new_tokens": 200, "custom_params": carried, **self.sampling}
        )
        sampling.normalize(None)
        own = self.prompt_tokens - self.shared_tokens
        fields = {
            "input_text": "", "input_embeds": None, "mm_inputs": None, "token_type_ids": None,
            "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0,
            "token_ids_logprob": None, "stream": False, **self.others,
        }  # fmt: skip
        return TokenizedGenerateReqInput(
            rid=rid,
            input_ids=_words(self.family, self.shared_tokens) + _words(1000 + self.number, own),
            sampling_params=sampling,
            **fields,
        )


def change(**changes: Any) -> Make:
    """Change settings of the running server, as `sage-sched set` does."""
    return lambda now_s: SetSettings(changes=json.dumps(changes))


def send(message: type[BaseReq], **fields: Any) -> Make:
    """Send another message."""
    return lambda now_s: message(**fields)


def _words(seed: int, number: int) -> array[int]:
    """Return words of a prompt. With different seeds the first words already differ."""
    places = range(number)
    return array("q", (NUM_SPECIAL_TOKENS + (seed * (n + 7) + n * n) % NUM_WORDS for n in places))
