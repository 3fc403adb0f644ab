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

from bench.whatif.log import Logged
from bench.whatif.shared_prompts import blocks_of
from bench.workload.prompts import WorkloadError

KIND = "requests of SGLang's dumps"
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


def read_dump(file: IO[bytes], path: Path, tokenizer: Any) -> Iterator[tuple[str, Logged | str]]:
    """Each request with its place, or why it is of no use. tokenizer: to read prompts that are
    token ids; None: these have no text. Raises WorkloadError."""
    try:
        dump = _Unpickler(file).load()
        dumped = list(dump["requests"])
    except Exception as error:  # a pickle that is none can raise anything
        raise WorkloadError(f"{path} is no request dump of SGLang: {error!r}") from error
    for number, entry in enumerate(dumped, 1):
        place = f"{path}: request {number}"
        try:
            asked, answer, created_s, finished_s = entry
            yield place, _logged(asked.fields, answer, float(created_s), finished_s, tokenizer)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            yield place, f"it is not as SGLang writes it ({error!r})"


def _logged(
    asked: Mapping[str, Any],
    answer: Mapping[str, Any],
    created_s: float,
    finished_s: Any,
    tokenizer: Any,
) -> Logged:
    meta = answer["meta_info"]
    given = asked.get("input_ids")
    is_one = isinstance(given, list | tuple) and bool(given) and isinstance(given[0], int)
    ids: Sequence[int] | None = given if is_one else None
    text = asked.get("text")
    if not isinstance(text, str):
        text = tokenizer.decode(list(ids)) if ids is not None and tokenizer is not None else ""
    blocks, block_tokens = blocks_of(text if ids is None else ids)
    return Logged(
        arrival_s=created_s,
        input_tokens=int(meta["prompt_tokens"]),
        output_tokens=int(meta["completion_tokens"]),
        cap_tokens=cap_of(asked),
        is_cut=is_cut(meta),
        prompt=text,
        blocks=blocks,
        block_tokens=block_tokens,
        ttlt_s=float(finished_s) - created_s,
    )


def cap_of(asked: Mapping[str, Any]) -> int | None:
    """max_new_tokens of a request's sampling_params, as SGLang has it
    (sglang/srt/sampling/sampling_params.py): 128 if nobody names it, none if it is null."""
    sampling = asked.get("sampling_params")
    if isinstance(sampling, Husk):
        sampling = sampling.fields
    if not isinstance(sampling, Mapping):
        return None
    cap = sampling.get("max_new_tokens", 128)
    return 0 if cap is None else int(cap)


def is_cut(meta: Mapping[str, Any]) -> bool:
    """Whether something else than its own end ended an answer."""
    reason = meta.get("finish_reason")
    return isinstance(reason, Mapping) and reason.get("type", "stop") != "stop"
