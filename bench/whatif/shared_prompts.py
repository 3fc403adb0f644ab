"""What prompts begin with alike, told by blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from bench.engines.simulator.radix_tree import Span, cut
from bench.whatif.log import Logged
from bench.workloads.prompts import stable_hash

_BLOCK_TOKENS = 64
_BLOCK_CHARS = 256
# Streams of tokens that nobody shares; a block's number is its stream.
_FIRST_OWN_STREAM = -(1 << 60)


def blocks_of(prompt: str | Sequence[int] | None) -> tuple[tuple[int, ...], int]:
    """The blocks of a prompt's text or token ids, and how many tokens one has, 0 of a text. Equal
    numbers: prompts are alike up to the end of that block."""
    if not prompt:
        return (), 0
    is_text = isinstance(prompt, str)
    size = _BLOCK_CHARS if is_text else _BLOCK_TOKENS
    so_far, blocks = 0, []
    for end in range(size, len(prompt) + 1, size):
        so_far = stable_hash(f"{so_far} {prompt[end - size : end]!r}") >> 2
        blocks.append(so_far)
    return tuple(blocks), 0 if is_text else size


def spans_of(requests: Sequence[Logged]) -> list[tuple[Span, ...]]:
    """Their prompts for the simulator; () for those that share nothing. Only blocks that come more
    than once are told apart, as the simulator takes its time for each."""
    counts = Counter(block for request in requests for block in request.blocks)
    text_tokens = _tokens_of_text_block(requests)
    spans: list[tuple[Span, ...]] = []
    for number, request in enumerate(requests):
        shared = list(takewhile(lambda block: counts[block] > 1, request.blocks))
        size = request.block_tokens or text_tokens
        # As in a server, at least the last token of a prompt is computed.
        found = cut([(block, 0, size) for block in shared], request.input_tokens - 1)
        rest = request.input_tokens - sum(end - first for _, first, end in found)
        own = (_FIRST_OWN_STREAM + number, 0, rest)
        spans.append((*found, own) if found else ())
    return spans


def _tokens_of_text_block(requests: Sequence[Logged]) -> int:
    """One number for the whole log, or prompts that are alike would not be cut alike."""
    told = [request for request in requests if request.blocks and not request.block_tokens]
    num_chars = sum(len(request.prompt) for request in told)
    num_tokens = sum(request.input_tokens for request in told)
    return max(1, round(_BLOCK_CHARS * num_tokens / num_chars)) if num_chars else 1
