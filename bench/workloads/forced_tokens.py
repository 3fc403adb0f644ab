"""Answers that were recorded, said again token by token.

As bench.workloads.forced_length forces the length of an answer, this forces its text: the model
reads what it is made to say, so that its hidden states are those of a model that says so. Every
policy then serves the same text. Needs --enable-custom-logit-processor, and this package importable
in the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from bench.workloads.forced_length import CERTAIN, num_output_tokens

if TYPE_CHECKING:
    import torch

# The recorded tokens travel in the request's own custom_params; no policy reads them.
TOKENS_KEY = "bench_output_ids"


class ForcedTokens(CustomLogitProcessor):  # type: ignore[misc]
    """Each request says custom_params[TOKENS_KEY], and nothing after."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """logits: (requests, vocabulary), changed in place."""
        for row, params in enumerate(custom_param_list or ()):
            if params and TOKENS_KEY in params:
                tokens = params[TOKENS_KEY]
                place = num_output_tokens(params["__req__"]) - 1
                logits[row] = -float("inf")
                logits[row, tokens[min(place, len(tokens) - 1)]] = CERTAIN
        return logits
