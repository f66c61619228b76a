"""The preview of a packed row: readable, at most 80 columns, and honest about what is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from shardwise.data import preview
from shardwise.data.sample import wrap

from . import data_kit as kit


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_trained_tokens_stand_between_marks_and_documents_between_rules(tmp_path: Path) -> None:
    records = [kit.chat("Who calls?", "Your brother Orlando."), kit.chat("Who?", "I.", "Why?", "So.")]
    prepared = kit.make(kit.jsonl(Path("c.jsonl"), records), tmp_path, seq_len=128)
    assert preview(prepared, kit.tokenizer(kit.CHATML)) == (
        "row 0 of 1, c.jsonl: 2 documents, 68 of 128 places, 16 ⟦trained⟧\n"
        "-- document 1, 28 tokens -------------------------------------------------------\n"
        "<|im_start|>user\n"
        "Who calls?<|im_end|>\n"
        "<|im_start|>assistant\n"
        "⟦Your brother Orlando.<|im_end|>⟧\n"
        "-- document 2, 40 tokens -------------------------------------------------------\n"
        "<|im_start|>user\n"
        "Who?<|im_end|>\n"
        "<|im_start|>assistant\n"
        "⟦I.<|im_end|>⟧\n"
        "<|im_start|>user\n"
        "Why?<|im_end|>\n"
        "<|im_start|>assistant\n"
        "⟦So.<|im_end|>⟧\n"
        "-- padding, 60 places ----------------------------------------------------------\n"
        "--------------------------------------------------------------------------------\n"
        "all rows: trained 23.5 % of tokens, padded 46.9 % of places, truncated 0.0 %"
    )


def test_a_piece_of_a_text_says_that_it_goes_on(tmp_path: Path) -> None:
    prepared = kit.make(str(kit.PLAY), tmp_path, seq_len=256)
    shown = [preview(prepared, kit.tokenizer(), row) for row in range(prepared.train.num_rows)]
    assert sum(", goes on from another row" in text for text in shown) == prepared.train.num_rows - 1
    assert sum("⟦" in text.split("\n", 1)[1] for text in shown) == prepared.train.num_rows


def test_long_documents_lose_their_middle_and_say_how_much(tmp_path: Path) -> None:
    prepared = kit.make(str(kit.PLAY), tmp_path, seq_len=4096)
    short, whole = preview(prepared, kit.tokenizer()), preview(prepared, kit.tokenizer(), max_lines=None)
    assert len(short.splitlines()) < 32 < len(whole.splitlines())
    left = int(next(line for line in short.splitlines() if line.startswith("... ")).split()[1])
    assert len(whole.splitlines()) == len(short.splitlines()) - 1 + left


def test_a_row_of_any_set_of_a_mixture_is_shown(tmp_path: Path) -> None:
    kit.jsonl(Path("a.jsonl"), [{"text": "alpha"}])
    kit.jsonl(Path("b.jsonl"), [{"text": "beta"}])
    prepared = kit.make(["a.jsonl", "b.jsonl"], tmp_path)
    assert preview(prepared, kit.tokenizer(), 0).startswith("row 0 of 2, a.jsonl: 1 document")
    assert preview(prepared, kit.tokenizer(), 1).startswith("row 1 of 2, b.jsonl: 1 document")


def test_nothing_in_the_data_can_steer_the_terminal(tmp_path: Path) -> None:
    Path("a.jsonl").write_text(json.dumps({"text": "red \x1b[31m bell \x07 back \x08"}) + "\n", "utf-8")
    shown = preview(kit.make("a.jsonl", tmp_path), kit.tokenizer())
    assert "\\x1b[31m bell \\x07 back \\x08" in shown
    assert all(c == "\n" or c.isprintable() for c in shown)


@given(st.text(max_size=400))
def test_no_line_is_wider_than_80_columns_and_no_character_but_space_is_lost(text: str) -> None:
    text = "".join(c for c in text if c == "\n" or c.isprintable())
    lines = wrap(text)
    assert all(cell_len(line) <= 80 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace("\n", "").replace(" ", "")
