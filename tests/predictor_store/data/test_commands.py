from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from dataclasses import astuple
from pathlib import Path

import pytest

from predictor_store.data.warm import uniform_sample
from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.store.file import Record
from predictor_store.store.store import Store, file_of
from sage_sched.app.config import StoreConfig
from sage_sched.cli import main
from tests.predictor_store.samples import lines, no_file_larger_than


@pytest.fixture(autouse=True)
def one_embedder(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor_store.data.warm.Embedder", lambda encoder: embedder)


def warm(*arguments: object) -> int:
    return main(["warm", *map(str, arguments)])


def stored(folder: Path, capacity: int = 10_000) -> list[Record]:
    with Store(StoreConfig(str(folder), capacity), fingerprint(), dimension()) as store:
        return [*store.load()]


def test_recorded_lengths_go_into_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], embedder: Embedder
) -> None:
    data = lines(
        tmp_path / "a\nd.jsonl",
        {"prompt": "one", "output_tokens": 10, "prompt_tokens": 3},
        "oops",
        {"prompt": "two \ud800", "output_tokens": 20, "cap": 20},
        {"prompt": "three", "output_tokens": 30, "model": "another"},
    )
    folder = tmp_path / "store"
    options = [data, "--filter", "model=null", "--store", folder]
    assert warm(*options) == 0
    said = capsys.readouterr().out
    assert all(
        part in said
        for part in ("a\\nd.jsonl:2", "left out: 1", "num_put: 2", "output_tokens.p50: 15")
    )
    records = stored(folder)
    assert [astuple(one)[1:] for one in records] == [
        (10, 3, False, "warm", ""), (20, 0, True, "warm", ""),
    ]  # fmt: skip
    assert records[0].vector @ embedder.embed(["one"])[0] > 0.999
    # Programs get JSON.
    assert warm(*options, "--json") == 0
    warmed = json.loads(capsys.readouterr().out)
    lengths = {"mean": 15, "p10": 11, "p50": 15, "p90": 19, "p99": 19.9, "max": 20}
    counts = {"num_read": 4, "num_filtered": 1, "num_left_out": 1, "num_put": 2}
    assert [*warmed.pop("left_out").values()] == [1]
    assert any("d.jsonl:2" in line for line in warmed.pop("log"))
    in_store = {"store": str(folder), "num_records": 4}
    assert warmed == counts | in_store | {"output_tokens": pytest.approx(lengths)}
    with Store(StoreConfig(str(folder)), fingerprint(), dimension()):
        assert main(["store", "info", "--json", "--store", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == in_store | {
        "output_tokens": lengths | {"p10": 10, "p90": 20, "p99": 20}, "capacity": 10_000,
        "num_warm": 4, "num_censored": 2, "embedder": fingerprint(), "dimension": dimension(),
        "num_bytes": file_of(folder).stat().st_size, "in_use_by": str(os.getpid()),
        "predictions": {},
    }  # fmt: skip


def test_recorded_lengths_go_before_texts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # One token per word, in the files that transformers needs.
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(
        tmp_path / "tokenizer"
    )
    data = lines(
        tmp_path / "d.jsonl",
        {"prompt": "a b c", "output": "one two \ud800 four"},
        {"prompt": "a", "output": "one two", "output_tokens": 99},
        {"prompt": "a", "output_tokens": 7},
        {"prompt": "a", "output": ""},
        {"prompt": "a b " * 5_000, "output_tokens": 8},  # longer than the embedded part
    )
    assert warm(data, "--store", tmp_path / "s", "--tokenizer", tmp_path / "tokenizer") == 0
    found = [(r.output_tokens, r.input_tokens) for r in stored(tmp_path / "s")]
    assert found == [(4, 3), (99, 1), (7, 1), (8, 10_000)]


def test_more_rows_than_room_are_sampled_over_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "p", "output_tokens": i + 1, "is_cut": i > 9} for i in range(300)]
    data = lines(tmp_path / "d.jsonl", *rows)
    assert warm(data, "--store", tmp_path / "a", "--capacity", 30, "--limit", 200) == 0
    assert "30 answers are cut" in capsys.readouterr().out
    lengths = [r.output_tokens for r in stored(tmp_path / "a", 30)]
    assert (len(lengths), lengths) == (30, sorted(set(lengths)))
    assert min(lengths) < 60 < 240 < max(lengths)
    # An existing store keeps its capacity, and the same seed takes the same rows.
    assert warm(data, "--store", tmp_path / "a") == 0
    assert warm(data, "--store", tmp_path / "b", "--limit", 30) == 0
    assert warm(data, "--store", tmp_path / "all") == 0
    assert len(stored(tmp_path / "all")) == len(rows)
    for name in "ab":
        assert [r.output_tokens for r in stored(tmp_path / name)] == lengths


def test_each_row_is_as_likely_to_be_sampled() -> None:
    counts = Counter(i for seed in range(2000) for i in uniform_sample(range(20), 5, seed))
    # Binomial(2000, 1/4): 500 and a standard deviation of 19.
    assert sorted(counts) == [i for i in range(20) if 400 < counts[i] < 600]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("warm good --store full", "It has what was written before"),
        ("warm good --filter model=none --store s", "--filter left out"),
        ("warm good --tokenizer ./none --store s", "there is no such folder"),
        ("warm good --tokenizer no/such --store s", "it is neither a folder nor in"),
        ("warm good --capacity 99999999999 --store s", "store.capacity"),
        ("warm good --store good", "cannot open the store"),
        ("store info --store none", "there is no store"),
        ("store info --store damaged", "is damaged"),
    ],
)
def test_user_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    command: str, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "good", {"prompt": "p", "output_tokens": 3})
    Path("damaged").mkdir()
    file_of(tmp_path / "damaged").write_bytes(b"damaged")
    with no_file_larger_than(1 << 10) if "full" in command else contextlib.nullcontext():
        assert main(command.split()) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"sage-sched {command.split(' --')[0].removesuffix(' good')}: ")
    assert said in last


@pytest.mark.parametrize(
    "bad", ["d --filter model", "d --filter =x", "d --limit 0", "d --limit x", ""]
)
def test_bad_arguments_are_refused(bad: str) -> None:
    with pytest.raises(SystemExit):
        warm(*bad.split())
