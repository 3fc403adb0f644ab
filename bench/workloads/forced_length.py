"""Forces answers of recorded length, without telling the scheduler.

SGLang's own benchmark fixes a length with ignore_eos and max_new_tokens, which shows the scheduler
the true length of every request. A real server does not know it. Here max_new_tokens is the same
cap for all. This logit processor bans the end token before the recorded length and forces it there.
It needs --enable-custom-logit-processor, and this package importable in the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

if TYPE_CHECKING:
    import torch

# The recorded length travels in the request's own custom_params; no policy reads it.
LENGTH_KEY = "bench_output_tokens"
# This logit beats any other. It stays finite in half precision and after division by a temperature.
CERTAIN = 1e4


class ForcedLength(CustomLogitProcessor):  # type: ignore[misc]
    """Ends each request at exactly custom_params[LENGTH_KEY] tokens, including the end token."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """Change the logits, shape (requests, vocabulary), in place."""
        rows = [
            (row, params["__req__"], params[LENGTH_KEY])
            for row, params in enumerate(custom_param_list or ())
            if params and LENGTH_KEY in params
        ]
        if not rows:
            return logits
        end_tokens = _end_tokens(rows[0][1])
        ending = [row for row, request, length in rows if num_output_tokens(request) >= length]
        # Trap: torch copies a list of indices to the GPU, and waits for the forward pass to do so.
        # SGLang would then not prepare its next step meanwhile. Single indices and slices are not
        # copied.
        all_rows = len(rows) == len(logits)
        places = [slice(None)] if all_rows else [row for row, _, _ in rows]
        for place in places:
            for token in end_tokens:
                logits[place, token] = -float("inf")
        for row in ending:
            logits[row, end_tokens[0]] = CERTAIN
        return logits

    # Trap: SGLang deserialises the class for every batch, and merges processors whose serialised
    # texts are equal. So that text must depend on the class's name alone.


def num_output_tokens(request: Any) -> int:
    """Return the number of output tokens of the request, including the token now being sampled.

    kv_committed_len covers the prompt and all output tokens before this one. SGLang sets it when it
    allocates the KV of a forward pass (mem_cache/allocation.py), before the launch. That holds in
    prefill and decode, with and without overlap, and again after a retraction. Trap: under overlap
    output_ids lack the token in flight, and a retraction drops that token.
    """
    return int(request.kv.kv_committed_len) - len(request.origin_input_ids) + 1


def _end_tokens(request: Any) -> list[int]:
    """Return every token at which SGLang stops (Req._check_token_based_finish), the usual one
    first."""
    tokens = list(request.eos_token_ids or ())
    tokenizer = request.tokenizer
    if tokenizer is not None:
        tokens = [tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ()), *tokens]
    return list(dict.fromkeys(tokens))
