"""Reads prompts and the lengths of their answers from logs and data sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from predictor_store.logs.errors import DatasetError, RowError
from predictor_store.logs.reader import LogReader, ReadOptions
from predictor_store.logs.request import LoggedRequest
from predictor_store.logs.summary import counts_of, lines_of
from predictor_store.predict.features import excerpt

_MOST_NAMED = 40


@dataclass(frozen=True, slots=True)
class Observation:
    """A prompt and the length of its answer, in tokens.

    prompt: the excerpt that is embedded.
    prompt_chars: the length of the whole prompt; 0 if the excerpt is all of it.
    output_tokens: 0 if only the answer's text, output, is known. input_tokens: 0 if unknown.
    censored: whether the answer was cut off at output_tokens by its cap.
    """

    prompt: str
    output_tokens: int
    input_tokens: int = 0
    censored: bool = False
    output: str | None = None
    prompt_chars: int = 0


class Observations:
    """Iterates over the observations in files and folders, and counts the other rows.

    tokenizer: if given, it counts the tokens of answers without a recorded length, and decodes
    prompts that are token ids.
    """

    def __init__(
        self, paths: Sequence[str], options: ReadOptions | None = None, tokenizer: Any = None
    ) -> None:
        """Read these files and folders. Raises DatasetError if one of them cannot be read."""
        self._reader = LogReader(paths, options, tokenizer)
        self._has_tokenizer = tokenizer is not None
        self.sources = self._reader.sources()

    def __iter__(self) -> Iterator[Observation]:
        """Yield the observations. Raises DatasetError if a file breaks, or none has a usable
        row."""
        for source in self.sources:
            for place, request in source:
                try:
                    observation = self._observation(request)
                except RowError as error:
                    source.counts.leave_out(place, error)
                else:
                    source.counts.used += 1
                    yield observation
        if not any(source.counts.used for source in self.sources):
            raise DatasetError(self._nothing_of_use())

    def lines(self) -> list[str]:
        """Return the first lines of output."""
        return lines_of(self._reader, self.sources)

    def _observation(self, request: LoggedRequest) -> Observation:
        if not request.prompt:
            why = "its prompt is token ids, which --tokenizer decodes" if request.ids else ""
            raise RowError("without a prompt", why)
        length = request.output_tokens
        if length is None and not request.output:  # an answer that calls a tool has no text
            raise RowError("without an answer length")
        if length is None and not self._has_tokenizer:
            raise RowError("without an answer length", "--tokenizer counts the tokens of its text")
        if length == 0:
            raise RowError("with no tokens", "its answer has none")
        cap = request.cap_tokens
        is_cut = request.is_cut or (cap is not None and length is not None and 0 < cap <= length)
        return Observation(
            excerpt(request.prompt),
            length or 0,
            request.input_tokens or 0,
            is_cut,
            request.output if length is None else None,
            len(request.prompt),
        )

    def _nothing_of_use(self) -> str:
        seen = sorted({name for source in self.sources for name in source.seen})
        formats = ", ".join(dict.fromkeys(source.format.name for source in self.sources))
        return (
            f"{', '.join(self._reader.paths)}: no usable row, in format {formats} (fields seen: "
            f"{', '.join(seen[:_MOST_NAMED]) or 'none'}): {counts_of(self.sources)}"
        )
