"""Describes a request of a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sage_sched.distribution import LengthDistribution


@dataclass(slots=True)
class LoggedRequest:
    """One request of a log. A field keeps its default if the log does not give it.

    arrival: the time of arrival, in the unit of the log's Clock. end: the time of its last token,
        in the same unit.
    output_tokens: of answer and reasoning together. output: the answer's text; None if it is
        missing.
    cap_tokens: its max_new_tokens; 0 if it has none, so that the rest of the context is its cap.
    is_cut: whether the answer did not end by the model's own choice.
    prompt: the text from which a server would predict. ids: the prompt's token ids.
    blocks: the prompt in blocks of block_tokens. Each number identifies the prompt up to the end of
        its block.
    ttlt_s: the time to the last token.
    session: names the conversation or program of the request; "" for none. id, parent: the ids of
        the request, and of the request whose answer it waited for. pause_s: the time between that
        answer and this request.
    forecast: the prediction of a server in shadow mode.
    """

    arrival: float | None = None
    end: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    output: str | None = None
    cap_tokens: int | None = None
    is_cut: bool = False
    prompt: str = ""
    ids: Sequence[int] = ()
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    ttlt_s: float | None = None
    session: str = ""
    id: str = ""
    parent: str = ""
    pause_s: float | None = None
    forecast: LengthDistribution | None = None
