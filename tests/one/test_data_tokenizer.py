"""The tokenizer: whose it is, a BPE trained on the text, and what is told where there is none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import TrainBPE
from shardwise.data import load_tokenizer
from shardwise.errors import NotReady, OnDisk, ShardwiseError, UsageError

from . import data_kit as kit


def load(ref: Any, tmp_path: Path, train: Any = str(kit.PLAY), model_dir: Path | None = None, **rest: Any) -> tuple[Any, Path]:
    return load_tokenizer(ref, model_dir, kit.config(train, tmp_path, **rest), tmp_path / "cache", where=kit.where)


def error_of(ref: Any, tmp_path: Path, **rest: Any) -> ShardwiseError:
    with pytest.raises(ShardwiseError) as caught:
        load(ref, tmp_path, **rest)
    return caught.value


def test_a_folder_or_else_the_model_folder_gives_the_tokenizer(tmp_path: Path) -> None:
    named, folder = load(str(kit.tokenizer_folder()), tmp_path)
    beside, other = load(None, tmp_path, model_dir=kit.tokenizer_folder())
    assert folder == other == kit.tokenizer_folder()
    assert len(named) == len(beside) == 700


def test_a_trained_bpe_has_the_size_asked_for_keeps_every_byte_and_knows_the_end_of_text(tmp_path: Path) -> None:
    tokenizer, _ = load(TrainBPE(train_bpe=512), tmp_path)
    assert len(tokenizer) == 512 and tokenizer.eos_token == "<|endoftext|>"
    for text in ("Enter Rosalind.\n\n  ROSALIND.\tO!", "naïve ☃ 中文 \x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_a_bpe_is_trained_once_and_again_for_another_text_or_size(tmp_path: Path) -> None:
    first = load({"train_bpe": 300}, tmp_path)[1]
    stamp = (first / "tokenizer.json").stat().st_mtime_ns
    assert load({"train_bpe": 300}, tmp_path)[1] == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == stamp
    assert load({"train_bpe": 301}, tmp_path)[1] != first
    (tmp_path / "other.txt").write_text("other words", "utf-8")
    assert load({"train_bpe": 300}, tmp_path, train=str(tmp_path / "other.txt"))[1] != first


def test_training_is_the_same_wherever_the_cache_lies(tmp_path: Path) -> None:
    one, two = load({"train_bpe": 400}, tmp_path / "a")[1], load({"train_bpe": 400}, tmp_path / "b")[1]
    assert (one / "tokenizer.json").read_bytes() == (two / "tokenizer.json").read_bytes()


def test_a_bpe_learns_from_what_is_said_not_from_names_of_roles(tmp_path: Path) -> None:
    chats = kit.jsonl(tmp_path / "c.jsonl", [kit.chat("wrestling " * 50, "wrestling " * 50)] * 5)
    vocabulary = load({"train_bpe": 280}, tmp_path, train=chats)[0].get_vocab()
    assert "Ġwrestling" in vocabulary and "assistant" not in vocabulary


# ---- what is told ----


def test_random_weights_and_no_tokenizer(tmp_path: Path) -> None:
    error = error_of(None, tmp_path)
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: no tokenizer: a model of random weights brings none\n"
        "  where: `model` (run.yaml)\n"
        "\n"
        "hint: `--set tokenizer=FOLDER` or a hub id\n"
        "hint: `--set tokenizer.train_bpe=4096` trains one on the training text"
    )


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    error = error_of("./nowhere", tmp_path)
    assert isinstance(error, OnDisk)
    assert error.text() == (
        "error: tokenizer folder `./nowhere` does not exist\n"
        "  where: `tokenizer` (run.yaml)\n"
        "\n"
        "hint: a hub id is written ORG/NAME"
    )


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = error_of(str(tmp_path / "empty"), tmp_path)
    assert isinstance(error, OnDisk)
    assert error.what == f"`{tmp_path}/empty` holds no tokenizer that can be loaded"
    assert error.hints == (
        "a tokenizer folder holds tokenizer.json and tokenizer_config.json",
        "`--set tokenizer=FOLDER` names another one",
    )


def test_a_tokenizer_with_code_of_its_own_does_not_run_it(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(kit.tokenizer_folder(), folder)
    (folder / "code.py").write_text("raise SystemExit('code ran')\n", "utf-8")
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", null]}}', "utf-8"
    )
    error = error_of(str(folder), tmp_path)
    assert isinstance(error, UsageError)
    assert error.text() == (
        f"error: the tokenizer in `{folder}` needs Python code of its own\n"
        "  where: `tokenizer` (run.yaml)\n"
        "  why: code from a model folder runs only if the run file says so\n"
        "\n"
        "hint: `--set trust_remote_code=true` once you have read it"
    )


def test_a_bpe_smaller_than_the_bytes(tmp_path: Path) -> None:
    error = error_of({"train_bpe": 100}, tmp_path)
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: a byte-level BPE of 100 tokens cannot be: 256 bytes and the end of text\n"
        "       are 257\n"
        "  where: `tokenizer` (run.yaml)\n"
        "\n"
        "hint: `--set tokenizer.train_bpe=1024`"
    )


def test_a_hub_id_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = error_of("some-org/no-such-tokenizer", tmp_path)
    assert isinstance(error, NotReady)
    assert error.what == "tokenizer `some-org/no-such-tokenizer` cannot be fetched\n       and is not in the local cache"
    assert error.hints == (
        "`--set tokenizer=FOLDER` with tokenizer.json and tokenizer_config.json",
        "with a network:\n      `hf download some-org/no-such-tokenizer` once, then run again",
    )
    assert max(map(len, error.text().splitlines())) <= 80
