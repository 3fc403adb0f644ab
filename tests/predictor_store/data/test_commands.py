from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from predictor_store.data.warm import uniform_sample
from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.store.file import Record
from predictor_store.store.store import Store, file_of
from sage_sched.app.config import StoreConfig
from sage_sched.cli import main
from tests.predictor_store.samples import lines


@pytest.fixture(autouse=True)
def one_embedder(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor_store.data.warm.Embedder", lambda encoder: embedder)


def warm(*arguments: object) -> int:
    return main(["warm", *map(str, arguments)])


def info(folder: Path) -> int:
    return main(["store", "info", "--store", str(folder)])


def stored(folder: Path, capacity: int = 10_000) -> list[Record]:
    with Store(StoreConfig(str(folder), capacity), fingerprint(), dimension()) as store:
        return store.load()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of one token a word, in the files that transformers wants."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


def test_recorded_lengths_go_into_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], embedder: Embedder
) -> None:
    data = lines(
        tmp_path / "d.jsonl",
        {"prompt": "one", "output_tokens": 10, "prompt_tokens": 3},
        "oops",
        {"prompt": "two \ud800", "output_tokens": 20, "cap": 20},
    )
    assert warm(data, "--store", tmp_path / "store") == 0
    first, second = stored(tmp_path / "store")
    assert (first.output_tokens, first.input_tokens, first.censored) == (10, 3, False)
    assert (second.output_tokens, second.censored) == (20, True)
    assert first.origin == second.origin == "warm"
    assert first.vector @ embedder.embed(["one"])[0] > 0.999
    out = capsys.readouterr().out
    assert out.startswith(f"{data}: table, by input prompt_tokens, output output_tokens")
    assert "2 requests used; left out: 1 that is no JSON" in out
    assert "num_read: 3\nnum_filtered: 0\nnum_left_out: 1\n" in out
    assert "num_put: 2\n" in out
    assert "output_tokens.p50: 15\n" in out


def test_recorded_lengths_go_before_texts(tmp_path: Path, tokenizer_folder: Path) -> None:
    data = lines(
        tmp_path / "d.jsonl",
        {"prompt": "a b c", "output": "one two \ud800 four"},
        {"prompt": "a", "output": "one two", "output_tokens": 99},
        {"prompt": "a", "output_tokens": 7},
        {"prompt": "a", "output": ""},
    )
    assert warm(data, "--store", tmp_path / "s", "--tokenizer", tokenizer_folder) == 0
    assert [(r.output_tokens, r.input_tokens) for r in stored(tmp_path / "s")] == [
        (4, 3),
        (99, 1),
        (7, 1),
    ]


def test_more_rows_than_room_are_sampled_over_all_of_them(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "output_tokens": i + 1} for i in range(300)]
    data = lines(tmp_path / "d.jsonl", *rows)
    assert warm(data, "--store", tmp_path / "a", "--capacity", 30) == 0
    lengths = [r.output_tokens for r in stored(tmp_path / "a", 30)]
    assert len(lengths) == 30
    assert lengths == sorted(set(lengths))
    assert min(lengths) < 60
    assert max(lengths) > 240

    # The capacity of a store that is there holds, and the same seed takes the same rows.
    assert warm(data, "--store", tmp_path / "a") == 0
    assert [r.output_tokens for r in stored(tmp_path / "a", 30)] == lengths
    assert warm(data, "--store", tmp_path / "b", "--limit", 30) == 0
    assert [r.output_tokens for r in stored(tmp_path / "b")] == lengths


def test_each_row_is_as_likely_to_be_sampled() -> None:
    counts = [0] * 20
    for seed in range(2000):
        for i in uniform_sample(range(20), 5, seed):
            counts[i] += 1
    # Binomial(2000, 1/4): 500 and a standard deviation of 19.
    assert all(400 < count < 600 for count in counts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{missing}"], "there is no file"),
        (["{bad}"], "in no known format (fields seen: x"),
        (["{good}", "--filter", "model=none"], "--filter left out"),
        (["{good}", "--tokenizer", "{missing}"], "there is no such folder"),
        (["{good}", "--tokenizer", "no/such"], "it is no folder here, and not in"),
        (["{good}", "--capacity", "99999999999"], "store.capacity"),
        (["{good}", "--store", "{foreign}"], "another model"),
        (["{good}", "--store", "{damaged}"], "damaged"),
        (["{good}", "--store", "{file}"], "cannot open the store"),
    ],
)
def test_user_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    lines(tmp_path / "good.jsonl", {"prompt": "p", "output_tokens": 3})
    lines(tmp_path / "bad.jsonl", {"x": "p"})
    lines(tmp_path / "file")
    (tmp_path / "damaged").mkdir()
    file_of(tmp_path / "damaged").write_bytes(b"damaged")
    Store(StoreConfig(str(tmp_path / "foreign")), "another model", dimension()).close()
    names = {path.stem: path for path in tmp_path.iterdir()} | {"missing": tmp_path / "no.jsonl"}
    arguments = [argument.format(**names) for argument in arguments]
    if "--store" not in arguments:
        arguments += ["--store", str(tmp_path / "s")]
    assert warm(*arguments) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("sage-sched warm: ")
    assert said in last


@pytest.mark.parametrize(
    "arguments", [["d", "--filter", "model"], ["d", "--limit", "0"], ["d", "--limit", "x"], []]
)
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        warm(*arguments)


def test_programs_get_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"prompt": "one", "output_tokens": 10}, {"prompt": "two", "output_tokens": 20, "cap": 20}
    data = lines(tmp_path / "d.jsonl", rows[0], "oops", rows[1])
    assert warm(data, "--store", tmp_path / "s", "--json") == 0
    warmed = json.loads(capsys.readouterr().out)
    assert (warmed["num_read"], warmed["num_put"], warmed["num_records"]) == (3, 2, 2)
    assert warmed["left_out"] == {"that is no JSON": 1}
    assert f"{data}:2" in "".join(warmed["log"])
    assert main(["store", "info", "--json", "--store", str(tmp_path / "s")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_records"], found["num_warm"], found["num_censored"]) == (2, 2, 1)
    assert (found["output_tokens"]["p50"], found["output_tokens"]["mean"]) == (15, 15)
    assert found["in_use_by"] is None


def test_info_shows_another_embedder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(StoreConfig(str(tmp_path)), "another model", 768):
        assert info(tmp_path) == 0
    out = capsys.readouterr().out
    assert "embedder: another model\ndimension: 768" in out
    assert f"in_use_by: {os.getpid()}" in out


@pytest.mark.parametrize("content", [None, b"damaged", b""])
def test_info_of_no_store_or_a_damaged_one_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    if content is not None:
        file_of(tmp_path).write_bytes(content)
    assert info(tmp_path) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


WARMER = """
import sys
from pathlib import Path
from predictor_store.data.warm import Observation, warm_store
from sage_sched.app.config import StoreConfig
rows = (Observation(f"prompt {i}", i + 1) for i in range(100_000))
warm_store(Path(sys.argv[1]), rows, StoreConfig())
"""


def test_a_killed_warm_up_leaves_a_valid_store(tmp_path: Path) -> None:
    wal = tmp_path / "history.sqlite3-wal"
    command = [sys.executable, "-c", WARMER, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as warmer:
        while not (wal.exists() and wal.stat().st_size > 1_000_000):
            assert warmer.poll() is None
            time.sleep(0.01)
        warmer.kill()
    lengths = [r.output_tokens for r in stored(tmp_path)]
    assert lengths == list(range(1, len(lengths) + 1))
    assert len(lengths) >= 256


def test_the_optional_data_can_be_warmed(shared_data: Path, tmp_path: Path) -> None:
    code = warm(
        shared_data / "alpaca_eval.jsonl.gz",
        *("--store", tmp_path, "--filter", "model=Meta-Llama-3-8B-Instruct", "--limit", "40"),
    )
    assert code == 0
    assert len(stored(tmp_path)) == 40
