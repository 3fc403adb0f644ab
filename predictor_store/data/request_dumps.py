"""SGLang's request dumps: pickles that `POST /configure_logging` has a server write, and those of
--crash-dump-folder (sglang/srt/managers/tokenizer_manager.py, dump_requests).

A pickle may run whatever it likes when it is loaded. Here nothing of it runs: whatever is no plain
data comes back as a Husk, which holds its fields.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from predictor_store.data.answered import MALFORMED, Answered, cap_of, is_cut

MAGIC = b"\x80"


class Husk:
    """An object of a class that is not loaded. fields: its state, by name."""

    fields: dict[str, Any]

    def __new__(cls, *args: object, **named: object) -> Husk:
        # Most are made without __init__.
        made = super().__new__(cls)
        made.fields = {}
        made.__setstate__((*args, named))
        return made

    def __setstate__(self, state: object) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                self.fields.update((str(name), value) for name, value in part.items())

    # Of pickled lists, dicts and sets of other classes.
    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass

    def add(self, item: object) -> None:
        pass

    def __setitem__(self, name: object, value: object) -> None:
        self.fields[str(name)] = value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Husk

    def persistent_load(self, pid: object) -> Any:
        return Husk()


def read_dump(file: IO[bytes], path: Path, tokenizer: Any) -> Iterator[tuple[str, Answered | str]]:
    """Each request with its place, or why it is of no use. tokenizer: to read prompts that are
    token ids; None: these have no text. Raises ValueError."""
    try:
        dump = _Unpickler(file).load()
        dumped = list(dump["requests"])
    except Exception as error:  # a pickle that is none can raise anything
        raise ValueError(f"{path} is no request dump of SGLang: {error!r}") from error
    for number, entry in enumerate(dumped, 1):
        place = f"{path}: request {number}"
        try:
            asked, answer, created_s, finished_s = entry
            yield place, _answered(_plain(asked), answer, float(created_s), finished_s, tokenizer)
        except MALFORMED as error:
            yield place, f"it is not as SGLang writes it ({error!r})"


def _plain(of: object) -> Mapping[str, Any]:
    """The fields of an object, and those of its sampling parameters."""
    if not isinstance(of, Husk):
        raise TypeError(f"{of!r:.80} is no request")
    sampling = of.fields.get("sampling_params")
    if isinstance(sampling, Husk):
        return {**of.fields, "sampling_params": sampling.fields}
    return of.fields


def _answered(
    asked: Mapping[str, Any],
    answer: Mapping[str, Any],
    created_s: float,
    finished_s: Any,
    tokenizer: Any,
) -> Answered:
    meta = answer["meta_info"]
    given = asked.get("input_ids")
    is_one = isinstance(given, list | tuple) and bool(given) and isinstance(given[0], int)
    ids: Sequence[int] = given if is_one and given else ()
    text = asked.get("text")
    if not isinstance(text, str):
        text = tokenizer.decode(list(ids)) if ids and tokenizer is not None else ""
    return Answered(
        arrival_s=created_s,
        input_tokens=int(meta["prompt_tokens"]),
        output_tokens=int(meta["completion_tokens"]),
        cap_tokens=cap_of(asked),
        is_cut=is_cut(meta),
        prompt=text,
        ids=ids,
        ttlt_s=float(finished_s) - created_s,
    )
