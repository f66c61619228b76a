"""Files, folders, globs and hub ids: what is found, in which order, and what a person is told when it is not there or torn."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.data.sources import Source, find
from shardwise.errors import NotReady, OnDisk, ShardwiseError, UsageError

from . import data_kit as kit

WHERE = "`data.train` (run.yaml:3)"


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names in messages are relative, as a person types them."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(path: str, **how: Any) -> list[Any]:
    return [record for record, _ in find(path, where=WHERE, **how).records()]


def error_of(path: str, **how: Any) -> ShardwiseError:
    with pytest.raises(ShardwiseError) as caught:
        records(path, **how)
    return caught.value


# ---- what is read ----


def test_jsonl_json_lists_and_parquet_give_the_same_records() -> None:
    rows = [{"text": "one", "n": 1}, {"text": "zwei ä", "n": 2}]
    kit.jsonl(Path("a.jsonl"), rows)
    Path("b.json").write_text(json.dumps(rows, indent=2), "utf-8")
    Path("c.jsonl").write_text("\n" + json.dumps(rows), "utf-8")
    Path("d.json").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    pq.write_table(pa.Table.from_pylist(rows), "e.parquet")
    for name in ("a.jsonl", "b.json", "d.json", "e.parquet"):
        assert records(name) == rows, name


def test_parquet_reads_only_the_columns_that_are_needed() -> None:
    pq.write_table(pa.Table.from_pylist([{"text": "one", "n": 1}]), "e.parquet")
    assert [record for record, _ in find("e.parquet").records(only={"text", "absent"})] == [{"text": "one"}]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_records() -> None:
    Path("a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n')
    assert records("a.jsonl") == [{"text": "one"}, {"text": "two"}]


def test_a_text_file_is_one_document() -> None:
    Path("a.txt").write_text("one\n\ntwo\n", "utf-8")
    assert records("a.txt") == [{"text": "one\n\ntwo\n"}]


def test_globs_and_folders_give_files_in_sorted_order() -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", "readme.rst"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name, "utf-8")
    assert [r["text"] for r in records("*.txt")] == ["a.txt", "b.txt"]
    assert [r["text"] for r in records("**/*.txt")] == ["a.txt", "b.txt", "deep/c.txt"]
    assert [r["text"] for r in records(".")] == ["a.txt", "b.txt"]


def test_with_format_text_any_file_is_a_text() -> None:
    Path("a.py").write_text("x = 1\n", "utf-8")
    assert records("a.py", as_text=True) == [{"text": "x = 1\n"}]


def test_each_record_knows_its_place() -> None:
    kit.jsonl(Path("a.jsonl"), [{"n": 1}, {"n": 2}])
    pq.write_table(pa.Table.from_pylist([{"n": 1}]), "e.parquet")
    assert [place for _, place in find("a.jsonl").records()] == ["a.jsonl:1", "a.jsonl:2"]
    assert [place for _, place in find("e.parquet").records()] == ["e.parquet, row 1"]


def test_what_identifies_a_source_is_name_size_and_content_not_time_or_folder() -> None:
    Path("a.txt").write_text("one", "utf-8")
    before = find("a.txt").facts()
    Path("sub").mkdir()
    Path("a.txt").rename("sub/a.txt")
    os.utime("sub/a.txt", (1, 1))
    assert find("sub/a.txt").facts() == before
    Path("sub/a.txt").write_text("two", "utf-8")
    assert find("sub/a.txt").facts() != before


# ---- the hub, without a network (tests/conftest or the sandbox has none; the variable makes it certain) ----


def test_a_hub_id_without_a_network_is_refused_at_once_with_what_to_give_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    error = error_of("HuggingFaceH4/ultrachat_200k")
    assert isinstance(error, NotReady)
    assert error.text() == (
        "error: hub data set `HuggingFaceH4/ultrachat_200k` cannot be fetched\n"
        "       and is not in the local cache\n"
        "  where: `data.train` (run.yaml:3)\n"
        "  why: Couldn't reach 'HuggingFaceH4/ultrachat_200k' on the Hub\n"
        "       (OfflineModeIsEnabled)\n"
        "\n"
        "hint: `--set data.train=FILE` with JSONL, Parquet or text on this machine\n"
        "hint: with a network:\n"
        "      `hf download --repo-type dataset HuggingFaceH4/ultrachat_200k`"
    )


def test_a_hub_data_set_is_read_row_by_row_and_only_the_columns_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    kit.jsonl(Path("a.jsonl"), [{"text": f"row {i}", "n": i} for i in range(3)])
    local = datasets.load_dataset("json", data_files="a.jsonl", split="train", cache_dir="hf")
    monkeypatch.setattr(datasets, "load_dataset", lambda hub_id, split: local)
    source = find("some/set", where=WHERE)
    assert list(source.records(only={"text"})) == [({"text": f"row {i}"}, f"some/set, row {i + 1}") for i in range(3)]
    assert source.facts() == [["some/set", "train", local._fingerprint]]


# ---- what is told ----


def test_a_missing_file_names_the_nearest_that_exists() -> None:
    Path("chats").mkdir()
    Path("chats/train.jsonl").touch()
    error = error_of("chats/trian.jsonl")
    assert isinstance(error, OnDisk)
    assert error.text() == (
        "error: `chats/trian.jsonl` does not exist\n  where: `data.train` (run.yaml:3)\n\nhint: `chats/train.jsonl` exists"
    )


def test_a_missing_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    error = error_of("chats/old/train.jsonl")
    assert (error.what, error.why) == (
        "`chats/old/train.jsonl` does not exist",
        f"nor does its folder; the last that does is\n{tmp_path}",
    )


def test_a_bare_name_is_told_how_a_hub_id_looks() -> None:
    assert error_of("wikitext").hints == ("a hub id is written ORG/NAME",)


def test_a_glob_without_a_match_says_from_where(tmp_path: Path) -> None:
    error = error_of("chats/*.jsonl")
    assert isinstance(error, OnDisk)
    assert error.text() == (
        "error: no file matches `chats/*.jsonl`\n"
        "  where: `data.train` (run.yaml:3)\n"
        f"  why: looked from {tmp_path}\n"
        "\n"
        "hint: `**` reaches into folders below, `*` does not"
    )


def test_a_folder_without_data_says_what_was_looked_for() -> None:
    Path("empty").mkdir()
    assert error_of("empty/").text() == (
        "error: folder `empty/` holds no data file\n"
        "  where: `data.train` (run.yaml:3)\n"
        "  why: looked for .json, .jsonl, .md, .ndjson, .parquet, .text, .txt\n"
        "\n"
        "hint: `empty/*` with `format: text` takes every file as a text"
    )


def test_an_unknown_kind_of_file_says_which_are_known() -> None:
    Path("a.csv").touch()
    error = error_of("a.csv")
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: `a.csv` is of no kind that can be told from its name\n"
        "  where: `data.train` (run.yaml:3)\n"
        "  why: known are .json, .jsonl, .md, .ndjson, .parquet, .text, .txt\n"
        "\n"
        "hint: `--set data.format=text` takes it as a text"
    )


def test_a_line_that_is_not_json_is_named_with_file_line_and_column() -> None:
    Path("a.jsonl").write_text('{"text": "one"}\n{"text": two}\n', "utf-8")
    error = error_of("a.jsonl")
    assert isinstance(error, OnDisk)
    assert error.text() == (
        "error: line 2 of `a.jsonl` is not JSON\n"
        '  here: {"text": two}\n'
        "                 ^\n"
        "  where: a.jsonl:2, column 10\n"
        "  why: Expecting value\n"
        "\n"
        "hint: one JSON object a line, or one list of objects in the whole file"
    )


def test_a_torn_json_list_is_named_with_its_line() -> None:
    Path("a.json").write_text('[\n {"text": "one"},\n {"text": oops}\n]', "utf-8")
    error = error_of("a.json")
    assert (error.what, error.where, error.why) == ("`a.json` is not JSON", "a.json:3, column 11", "Expecting value")


def test_a_record_that_is_no_object_is_refused() -> None:
    Path("a.jsonl").write_text('{"text": "one"}\n"two"\n', "utf-8")
    error = error_of("a.jsonl")
    assert isinstance(error, OnDisk)
    assert error.text() == (
        "error: a record is text, not an object with named columns\n"
        "  where: a.jsonl:2\n"
        "\n"
        'hint: `{"text": "..."}` or `{"messages": [...]}` are records'
    )


def test_bytes_that_are_not_utf8_are_named() -> None:
    Path("a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "caf\xe9"}\n')
    Path("a.txt").write_bytes(b"one\ntwo \xe9\n")
    assert error_of("a.jsonl").text() == (
        "error: line 2 of `a.jsonl` is not UTF-8: byte 14 is 0xe9\n"
        "  where: a.jsonl:2\n"
        "\n"
        "hint: `iconv -f latin1 -t utf-8 a.jsonl` converts it"
    )
    assert (error_of("a.txt").what, error_of("a.txt").where) == ("`a.txt` is not UTF-8: byte 9 is 0xe9", "a.txt:2")


def test_a_torn_parquet_file_is_named() -> None:
    pq.write_table(pa.Table.from_pylist([{"text": "one"}]), "e.parquet")
    Path("e.parquet").write_bytes(Path("e.parquet").read_bytes()[:-10])
    error = error_of("e.parquet")
    assert isinstance(error, OnDisk)
    assert (error.what, error.where) == ("`e.parquet` is not a whole Parquet file", "e.parquet")


def test_a_file_that_may_not_be_read_is_named() -> None:
    source = Source("gone.txt", WHERE, (Path("gone.txt"),))
    with pytest.raises(OnDisk) as caught:
        list(source.records())
    assert (caught.value.what, caught.value.why) == ("`gone.txt` cannot be read", "No such file or directory")
