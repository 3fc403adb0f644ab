"""A request as a row of a log gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sage_sched.distribution import LengthDistribution


@dataclass(slots=True)
class LoggedRequest:
    """One request of a log. A default value means that the row does not say it.

    arrival: on the log's clock, in the unit of its Clock; end: of its last token, on the same one.
    output_tokens: with reasoning. output: the answer's text, None if it is not there.
    cap_tokens: its max_new_tokens; 0 if it has none, so that the rest of the context is its cap.
    is_cut: something other than the model's own end ended the answer.
    prompt: the text that a server would predict by. ids: the prompt's token ids.
    blocks: of the prompt, each standing for itself and all before it; block_tokens: its size.
    ttlt_s: the time to the last token.
    session: names what the request belongs to; "" for nothing. id, parent: the request, and the one
    whose answer it waited for. pause_s: between that answer and this request.
    forecast: what a server in shadow mode predicted.
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
