"""Implements `sage-sched warm`, which fills a store from prompts and lengths observed elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from predictor_store.cached_file import expanded
from predictor_store.data.observations import Observation as Observation
from predictor_store.data.observations import Observations
from predictor_store.logs.errors import DatasetError
from predictor_store.logs.options import add_options, read_options
from predictor_store.logs.summary import cautions_of_lengths
from predictor_store.logs.tokens import num_tokens
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder, dimension, fingerprint
from predictor_store.store.file import Record, StoreError
from predictor_store.store.store import Store, folder_of, recorded_capacity
from predictor_store.terminal import (
    add_json,
    add_store,
    at_least_one,
    field_and_value,
    print_found,
    printable,
    speaker,
)
from predictor_store.torchvision_schemas import define_missing
from sage_sched.app.config import ENCODERS, StoreConfig
from sage_sched.fields import parse_section

# Observations committed together. The embedder sorts them by length, so that short ones are not
# padded.
_CHUNK = 256

T = TypeVar("T")


def warm_store(
    path: Path,
    observations: Iterable[Observation],
    config: StoreConfig,
    encoder: str = DEFAULT_ENCODER,
) -> int:
    """Put observations, oldest first, into the store in the folder path. Return the number of its
    records.

    Makes the store if there is none. If the process is killed, the store is valid and has some of
    the observations. Raises StoreError, also if the disk is full.
    """
    config = dataclasses.replace(config, path=str(path))
    with Store(config, fingerprint(encoder), dimension(encoder)) as store:
        embedder, remaining = Embedder(encoder), iter(observations)
        with tqdm(desc="embedding", unit="prompt", mininterval=1) as progress:
            while chunk := list(itertools.islice(remaining, _CHUNK)):
                vectors = embedder.embed([observation.prompt for observation in chunk])
                for of, vector in zip(chunk, vectors, strict=True):
                    known = of.output_tokens, of.input_tokens, of.censored
                    store.add(Record(vector, *known, "warm"))
                store.flush(now=True)
                if store.write_error is not None:
                    raise StoreError(
                        f"cannot write the store {path}: {store.write_error}. It has what was "
                        "written before"
                    )
                progress.update(len(chunk))
        return store.num_records


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets", nargs="+", metavar="DATASET",
        help="files or folders of prompts with answers or their lengths, in any format "
        "that `sage-sched formats` lists",
    )  # fmt: skip
    add_options(parser)
    add_store(parser)
    parser.add_argument(
        "--capacity", type=at_least_one, metavar="N",
        help="the number of records that the store keeps; default: as before, or "
        f"{StoreConfig().capacity} in a new one",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", metavar="MODEL_PATH",
        help="the served model's folder, whose tokenizer counts the tokens of answers and decodes "
        "prompts that are token ids",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=at_least_one, metavar="N", help="take a uniform sample of N rows"
    )
    parser.add_argument(
        "--filter", action="append", default=[], type=field_and_value, metavar="FIELD=VALUE",
        help="take only rows with this value; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--encoder", choices=ENCODERS, default=DEFAULT_ENCODER,
        help="the server's predictor.encoder; default: %(default)s",
    )  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Fill the store. Raises UserError if a dataset, the tokenizer or the store is bad."""
    say = speaker(args)
    print_found(_warm(args, say), args.json)
    return 0


def _warm(args: argparse.Namespace, say: Callable[..., None]) -> dict[str, Any]:
    folder = folder_of(StoreConfig(path=args.store))
    capacity = args.capacity or recorded_capacity(folder) or StoreConfig().capacity
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    rows = Observations(args.datasets, read_options(args), tokenizer)
    observations = uniform_sample(rows, min(capacity, args.limit or capacity))
    if tokenizer is not None:
        observations = [counted(each, tokenizer) for each in observations]
    cautions = cautions_of_lengths(
        [each.output_tokens for each in observations], sum(each.censored for each in observations)
    )
    lines = [*rows.lines(), *(f"CAUTION: {said}" for said in cautions)]
    say("\n".join(map(printable, lines)), flush=True)
    config: StoreConfig = parse_section(StoreConfig, "store", {"capacity": capacity})
    num_records = warm_store(folder, observations, config, args.encoder)
    counts = [source.counts for source in rows.sources]
    left_out = sum((each.left_out for each in counts), Counter[str]())
    return {
        **({"log": lines} if args.json else {}),
        "num_read": sum(each.read for each in counts),
        "num_filtered": sum(each.filtered for each in counts),
        "num_left_out": left_out.total(),
        "left_out": dict(left_out),
        "num_put": len(observations),
        "store": str(folder),
        "num_records": num_records,
        "output_tokens": quantiles([observation.output_tokens for observation in observations]),
    }


def uniform_sample(rows: Iterable[T], size: int, seed: int = 0) -> list[T]:
    """Return a sample of `size` rows, in their order, each equally likely (Vitter 1985, algorithm
    R)."""
    chosen: list[tuple[int, T]] = []
    rng = random.Random(seed)
    for i, row in enumerate(rows):
        if i < size:
            chosen.append((i, row))
        elif (j := rng.randrange(i + 1)) < size:
            chosen[j] = (i, row)
    return [row for _, row in sorted(chosen, key=lambda pair: pair[0])]


def counted(of: Observation, tokenizer: Any) -> Observation:
    """Return the observation with the tokens of its texts, unless lengths are recorded."""
    if of.output is not None:
        of = dataclasses.replace(of, output_tokens=num_tokens(tokenizer, of.output))
    if of.input_tokens:
        return of
    per_char = num_tokens(tokenizer, of.prompt) / len(of.prompt)
    input_tokens = round(per_char * max(of.prompt_chars, len(of.prompt)))
    return dataclasses.replace(of, input_tokens=input_tokens)


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer of a model's folder, or of a model in the hub's cache. Raises
    DatasetError."""
    folder = expanded(model_path)
    is_folder = folder.is_dir()
    if not is_folder and (model_path.startswith(("/", ".", "~")) or folder.exists()):
        raise DatasetError(f"cannot load a tokenizer from {model_path}: there is no such folder")
    define_missing()
    from transformers import AutoTokenizer

    name = str(folder) if is_folder else model_path
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    # transformers passes on any error of the packages that it uses.
    except Exception as error:
        reason = " ".join(str(error).split())
        if not is_folder and isinstance(error, OSError):
            reason = "it is neither a folder nor in this host's cache of Hugging Face's hub"
        raise DatasetError(f"cannot load a tokenizer from {model_path}: {reason}") from error


def quantiles(lengths: list[int]) -> dict[str, float]:
    """Return the mean and some quantiles, by name."""
    found = np.quantile(lengths, [0.1, 0.5, 0.9, 0.99, 1.0]).tolist()
    names = ("mean", "p10", "p50", "p90", "p99", "max")
    return dict(zip(names, [float(np.mean(lengths)), *found], strict=True))
