"""From files to batches: every token is where it belongs, the cache is used and whole, and what cannot be trained is refused."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.data import Batch, Mixture, PackedSet, Prepared, cache_folder, load_tokenizer, open_prepared
from shardwise.errors import NotReady, OnDisk, ShardwiseError, UsageError

from . import data_kit as kit

WORDS = kit.PLAY.read_text("utf-8").split()


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def speech(rng: random.Random, most: int = 30) -> str:
    at = rng.randrange(len(WORDS) - most)
    return " ".join(WORDS[at : at + rng.randint(1, most)])


def chats(num: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [kit.chat(*(speech(rng) for _ in range(2 * rng.randint(1, 3)))) for _ in range(num)]


def texts(num: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"text": f"{i} {speech(rng, 80)}"} for i in range(num)]


def whole(one: PackedSet | Mixture) -> Batch:
    return one.rows(range(one.num_rows))


def documents(batch: Batch, seq_len: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each stretch that begins at position 0, padding included."""
    out = []
    for ids, positions, labels in zip(batch.input_ids, batch.position_ids, batch.labels, strict=True):
        begins = [*np.flatnonzero(positions == 0).tolist(), seq_len]
        out += [(ids[a:b].tolist(), labels[a:b].tolist()) for a, b in pairwise(begins)]
    return out


def error_of(*args: Any, **rest: Any) -> ShardwiseError:
    with pytest.raises(ShardwiseError) as caught:
        kit.make(*args, **rest)
    return caught.value


# ---- what is in a batch ----


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12), seq_len=st.integers(2, 40), seed=st.integers(0, 99))
def test_each_token_of_each_text_stands_in_exactly_one_row_and_is_a_target_once(
    tmp_path: Path, lengths: list[int], seq_len: int, seed: int
) -> None:
    tokenizer = kit.tokenizer()
    rows = [" ".join([str(i), *WORDS[seed * 9 : seed * 9 + n]]) for i, n in enumerate(lengths)]
    train = kit.make(kit.jsonl(Path("t.jsonl"), [{"text": row} for row in rows]), tmp_path, seq_len=seq_len).train
    expected = [[*tokenizer(row)["input_ids"], tokenizer.eos_token_id] for row in rows]
    found, targets = [], []
    batch = whole(train)
    for ids, labels in documents(batch, seq_len):
        kept = [label for label in labels if label != -100]
        if kept or ids != [tokenizer.eos_token_id] * len(ids):  # not padding
            found += ids
            targets += kept
        assert all(a == b for a, b in zip(ids[1:], labels, strict=False) if b != -100), "a label is the next token"
    stats = train.sets[0].stats
    lone_ends = sum(len(e) % seq_len == 1 for e in expected)  # a piece of one end token looks like padding above
    assert len(found) + lone_ends >= sum(map(len, expected)) == stats.num_tokens
    assert sorted(targets) == sorted(t for e in expected for t in e[1:])
    assert batch.num_valid == stats.num_targets == train.valid.sum() == sum(len(e) - 1 for e in expected)


def test_conversations_stand_whole_in_rows_with_only_the_answers_as_labels(tmp_path: Path) -> None:
    tokenizer, records = kit.tokenizer(kit.CHATML), chats(40)
    train = kit.make(kit.jsonl(Path("c.jsonl"), records), tmp_path, seq_len=400).train
    expected = sorted(tokenizer.apply_chat_template(r["messages"], return_dict=False) for r in records)
    found = [(ids, labels) for ids, labels in documents(whole(train), 400) if set(labels) != {-100}]
    assert sorted(ids for ids, _ in found) == expected
    answers = sorted(m["content"] + "<|im_end|>" for r in records for m in r["messages"] if m["role"] == "assistant")
    spoken = []
    for _, labels in found:
        for part in "".join(tokenizer.decode([t]) if t != -100 else "\0" for t in labels).split("\0"):
            spoken += [part] if part else []
    assert sorted(spoken) == answers


def test_labels_never_reach_over_the_border_of_two_documents(tmp_path: Path) -> None:
    train = kit.make(kit.jsonl(Path("t.jsonl"), texts(30)), tmp_path, seq_len=500).train
    batch, eos = whole(train), kit.tokenizer().eos_token_id
    assert (batch.labels[batch.input_ids == eos] == -100).all()


def test_valid_counts_the_labels_of_each_row(tmp_path: Path) -> None:
    for name, records in (("t", texts(30)), ("c", chats(30))):
        train = kit.make(kit.jsonl(Path(f"{name}.jsonl"), records), tmp_path).train
        assert train.valid.tolist() == (whole(train).labels != -100).sum(1).tolist()


def test_padding_is_a_document_of_its_own_without_labels(tmp_path: Path) -> None:
    train = kit.make(kit.jsonl(Path("t.jsonl"), [{"text": "Exeunt."}]), tmp_path, seq_len=64).train
    batch, used = whole(train), train.sets[0].stats.num_tokens
    assert batch.position_ids[0].tolist() == [*range(used), *range(64 - used)]
    assert (batch.labels[0, used - 1 :] == -100).all()


def test_row_minus_one_has_no_target(tmp_path: Path) -> None:
    train = kit.make(kit.jsonl(Path("t.jsonl"), texts(5)), tmp_path).train
    batch = train.rows([0, -1])
    assert (batch.labels[1] == -100).all() and batch.position_ids[1].tolist() == list(range(64))
    assert batch.num_valid == train.valid[0]


def test_a_long_conversation_is_truncated_or_dropped_as_configured_and_counted(tmp_path: Path) -> None:
    path = kit.jsonl(Path("c.jsonl"), [kit.chat("Who?", "I."), kit.chat("Who?", " ".join(WORDS[:200]))])
    lengths = [len(kit.tokenizer(kit.CHATML).apply_chat_template(r, return_dict=False)) for r in _messages(path)]
    cut = kit.make(path, tmp_path, long="truncate").train.sets[0].stats
    assert (cut.num_documents, cut.truncated_documents, cut.dropped_documents) == (2, 1, 0)
    assert cut.num_truncated == lengths[1] - 64 and cut.truncated_share == (lengths[1] - 64) / sum(lengths)
    left = kit.make(path, tmp_path, long="drop").train.sets[0].stats
    assert (left.num_documents, left.truncated_documents, left.dropped_documents) == (1, 0, 1)
    assert left.num_truncated == lengths[1]


def test_a_conversation_whose_answer_lies_beyond_seq_len_is_dropped_not_trained_on_nothing(tmp_path: Path) -> None:
    path = kit.jsonl(Path("c.jsonl"), [kit.chat("Who?", "I."), kit.chat(" ".join(WORDS[:200]), "I.")])
    train = kit.make(path, tmp_path).train
    assert (train.sets[0].stats.num_documents, train.sets[0].stats.dropped_documents) == (1, 1)
    assert (train.valid > 0).all()


def _messages(path: str) -> list[Any]:
    return [json.loads(line)["messages"] for line in Path(path).read_text("utf-8").splitlines()]


# ---- several sets ----


def test_a_mixture_numbers_the_rows_of_all_sets(tmp_path: Path) -> None:
    kit.jsonl(Path("t.jsonl"), texts(20))
    kit.jsonl(Path("c.jsonl"), chats(20))
    mixture = kit.make([{"path": "t.jsonl", "weight": 3}, {"path": "c.jsonl", "weight": 1}], tmp_path).train
    text, chat = mixture.sets
    assert mixture.weights == [3, 1] and mixture.num_rows == text.num_rows + chat.num_rows
    mixed = mixture.rows([text.num_rows, 0, -1, mixture.num_rows - 1])
    alone = [chat.rows([0]), text.rows([0]), text.rows([-1]), chat.rows([chat.num_rows - 1])]
    assert mixed.input_ids.tolist() == [b.input_ids[0].tolist() for b in alone]
    assert mixed.labels.tolist() == [b.labels[0].tolist() for b in alone]
    assert mixed.num_valid == sum(b.num_valid for b in alone)


def test_a_set_may_have_its_own_format_and_columns(tmp_path: Path) -> None:
    kit.jsonl(Path("t.jsonl"), texts(3))
    kit.jsonl(Path("q.jsonl"), [{"q": "Who?", "a": "I."}])
    own = {"path": "q.jsonl", "format": "prompt", "columns": {"prompt": "q", "completion": "a"}}
    assert [s.stores[0].meta["format"] for s in kit.make(["t.jsonl", own], tmp_path).train.sets] == ["text", "prompt"]


# ---- validation ----


def _held(prepared: Prepared) -> tuple[set[str], set[str]]:
    tokenizer = kit.tokenizer()
    sides = []
    for one in (prepared.train, prepared.validation["validation"]):
        decoded = [tokenizer.decode(ids) for ids, labels in documents(whole(one), 600) if set(labels) != {-100}]
        sides.append(set(decoded))
    return sides[0], sides[1]


def test_a_share_holds_out_whole_documents_by_seed_before_packing(tmp_path: Path) -> None:
    path = kit.jsonl(Path("t.jsonl"), texts(50))
    prepared = kit.make(path, tmp_path, validation=0.1, seq_len=600)
    train, held = _held(prepared)
    assert len(held) == 5 and len(train) == 45 and not train & held
    assert _held(kit.make(path, tmp_path, validation=0.1, seq_len=600)) == (train, held)
    assert _held(kit.make(path, tmp_path, validation=0.1, seq_len=600, seed=1)) != (train, held)


def test_a_share_of_less_than_one_conversation_holds_out_one(tmp_path: Path) -> None:
    prepared = kit.make(kit.jsonl(Path("c.jsonl"), chats(5)), tmp_path, validation=0.01, seq_len=600)
    assert prepared.validation["validation"].stats.num_documents == 1
    assert prepared.train.sets[0].stats.num_documents == 4


def test_of_one_text_the_end_is_held_out(tmp_path: Path) -> None:
    prepared = kit.make(str(kit.PLAY), tmp_path, validation=0.1)
    tokens = prepared.train.sets[0].stores[0].tokens
    train, held = prepared.train.sets[0].stats.num_tokens, prepared.validation["validation"].stats.num_tokens
    assert train + held == len(tokens) and held == round(0.1 * len(tokens))
    held_ids = np.concatenate([b for b, _ in documents(whole(prepared.validation["validation"]), 64)])[:held]
    assert held_ids.tolist() == tokens[train:].tolist()


def test_a_share_of_several_sets_is_one_validation_set(tmp_path: Path) -> None:
    kit.jsonl(Path("t.jsonl"), texts(20))
    kit.jsonl(Path("c.jsonl"), chats(20))
    prepared = kit.make(["t.jsonl", "c.jsonl"], tmp_path, validation=0.2)
    assert list(prepared.validation) == ["validation"]
    assert [store.meta["format"] for store in prepared.validation["validation"].stores] == ["text", "chat"]
    assert (
        prepared.validation["validation"].valid.tolist()
        == (whole(prepared.validation["validation"]).labels != -100).sum(1).tolist()
    )


def test_validation_sets_may_be_a_path_or_named_paths(tmp_path: Path) -> None:
    for name in "abc":
        kit.jsonl(Path(f"{name}.jsonl"), texts(4))
    assert list(kit.make("a.jsonl", tmp_path, validation="b.jsonl").validation) == ["validation"]
    assert list(kit.make("a.jsonl", tmp_path, validation={"new": "b.jsonl", "old": "c.jsonl"}).validation) == ["new", "old"]


# ---- the cache ----


def test_a_second_run_tokenises_nothing_and_opens_the_same_folder(tmp_path: Path) -> None:
    path = kit.jsonl(Path("c.jsonl"), chats(10))
    first = kit.make(path, tmp_path)
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*")}
    second = kit.make(path, tmp_path)
    assert second.folder == first.folder
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*")} == stamps


def test_another_seq_len_packs_anew_from_the_same_tokens(tmp_path: Path) -> None:
    path = kit.jsonl(Path("c.jsonl"), chats(10))
    one, two = kit.make(path, tmp_path), kit.make(path, tmp_path, seq_len=128)
    assert one.folder != two.folder
    assert one.train.sets[0].stores[0].folder == two.train.sets[0].stores[0].folder


@pytest.mark.parametrize("change", ["content", "system", "tokenizer", "columns", "format"])
def test_whatever_decides_the_tokens_makes_them_anew(tmp_path: Path, change: str) -> None:
    records = [{**r, "prompt": "Who?", "completion": "I.", "other": "They."} for r in chats(4)]
    path = kit.jsonl(Path("c.jsonl"), records)
    first = kit.make(path, tmp_path).train.sets[0].stores[0].folder
    rest: dict[str, Any] = {
        "system": {"system": "Be brief."},
        "columns": {"columns": {"prompt": "other"}},
        "format": {"format": "prompt"},
    }.get(change, {})
    if change == "content":
        kit.jsonl(Path("c.jsonl"), records[:3])
    template = kit.CHATML.replace("<|im_end|>\n", "<|im_end|>") if change == "tokenizer" else kit.CHATML
    assert kit.make(path, tmp_path, template, **rest).train.sets[0].stores[0].folder != first


def test_opening_needs_only_the_folder(tmp_path: Path) -> None:
    prepared = kit.make(kit.jsonl(Path("t.jsonl"), texts(20)), tmp_path, validation=0.2)
    (tmp_path / "t.jsonl").unlink()
    opened = open_prepared(prepared.folder)
    assert (whole(opened.train).labels == whole(prepared.train).labels).all()
    assert opened.validation["validation"].stats == prepared.validation["validation"].stats
    tokenizer, _ = load_tokenizer(str(opened.tokenizer_dir), None, None, tmp_path)
    assert tokenizer("Exeunt.")["input_ids"] == kit.tokenizer()("Exeunt.")["input_ids"]
    assert tokenizer.chat_template == kit.CHATML


def test_tokens_are_memory_mapped(tmp_path: Path) -> None:
    opened = open_prepared(kit.make(kit.jsonl(Path("c.jsonl"), chats(20)), tmp_path).folder)
    store = opened.train.sets[0].stores[0]
    assert isinstance(store.tokens, np.memmap) and isinstance(store.marks, np.memmap)
    assert isinstance(opened.train.sets[0].pieces.starts, np.memmap)
    assert store.tokens.dtype == np.uint16


def test_a_torn_cache_is_noticed_by_ranks_and_made_anew_by_the_next_run(tmp_path: Path) -> None:
    path = kit.jsonl(Path("c.jsonl"), chats(20))
    prepared = kit.make(path, tmp_path)
    torn = prepared.train.sets[0].stores[0].folder / "tokens.bin"
    expected = whole(prepared.train).input_ids.copy()
    del prepared
    torn.write_bytes(torn.read_bytes()[:-2])
    folder = next((tmp_path / "cache/prepared").iterdir())
    with pytest.raises(OnDisk) as caught:
        open_prepared(folder)
    assert caught.value.text() == (
        f"error: prepared data are missing or torn\n  where: {torn.parent}\n\n"
        "hint: run the same command again: it prepares them anew"
    )
    assert (whole(kit.make(path, tmp_path).train).input_ids == expected).all()


def test_what_was_left_aside_by_a_killed_run_goes_after_a_day(tmp_path: Path) -> None:
    aside = tmp_path / "cache/documents/.tmp-old-x"
    aside.mkdir(parents=True)
    young = tmp_path / "cache/documents/.tmp-young-x"
    young.mkdir()
    os.utime(aside, (time.time() - 90_000,) * 2)
    kit.make(kit.jsonl(Path("t.jsonl"), texts(3)), tmp_path)
    assert not aside.exists() and young.exists()


def test_a_run_that_fails_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    Path("t.jsonl").write_text('{"text": "one"}\n{"text": 2}\n', "utf-8")
    assert error_of("t.jsonl", tmp_path).where == "t.jsonl:2"
    assert list((tmp_path / "cache/documents").iterdir()) == []


def test_two_processes_that_prepare_at_once_both_succeed(tmp_path: Path) -> None:
    kit.jsonl(Path("c.jsonl"), chats(50))
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.one import data_kit as kit\n"
        "print(kit.make('c.jsonl', Path(sys.argv[2])).folder.name)"
    )
    root = str(Path(__file__).parents[2])
    both = [
        subprocess.Popen([sys.executable, "-c", code, root, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    names = {p.communicate(timeout=60)[0].strip() for p in both}
    assert all(p.returncode == 0 for p in both) and len(names) == 1
    assert not list((tmp_path / "cache").rglob(".tmp-*"))


def test_a_full_disk_is_told_with_its_folder_and_leaves_nothing(tmp_path: Path) -> None:
    path, cfg = kit.jsonl(Path("t.jsonl"), texts(400)), tmp_path / "cache/documents"
    prepare_tokenizer = kit.make(kit.jsonl(Path("small.jsonl"), texts(1)), tmp_path)  # the limit is for the tokens alone
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        error = error_of(path, tmp_path, tokenizer=_Saved(prepare_tokenizer.tokenizer_dir))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(error, NotReady)
    assert error.what.startswith("the disk of the data cache is full, ")
    assert (error.where, error.why) == (str(cfg), "File too large")
    assert error.hints == ("`--set data.cache_dir=FOLDER` on a disk with more room",)
    assert len(list(cfg.iterdir())) == 1  # the small set


class _Saved:
    """The test tokenizer, saving itself by hard links: its own files are larger than the limit of the test above."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.own = folder, kit.tokenizer(kit.CHATML)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, *args: Any, **rest: Any) -> Any:
        return self.own(*args, **rest)

    def __len__(self) -> int:
        return len(self.own)

    def save_pretrained(self, folder: Path) -> None:
        for path in self.folder.iterdir():
            if path.name != "shardwise.meta":
                os.link(path, folder / path.name)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    Path("file").touch()
    path = kit.jsonl(Path("t.jsonl"), texts(2))
    error = error_of(path, tmp_path, cache_dir="file/cache")
    assert isinstance(error, NotReady)
    assert (error.what, error.why) == ("the data cache cannot be written", "Not a directory")


def test_the_cache_lies_where_the_run_file_or_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(kit.config("a", tmp_path)) == tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(kit.config("a", tmp_path, cache_dir=None)) == tmp_path / "xdg/shardwise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(kit.config("a", tmp_path, cache_dir=None)) == Path.home() / ".cache/shardwise"


def test_progress_says_what_was_decided_and_the_three_shares(tmp_path: Path) -> None:
    path = kit.jsonl(Path("c.jsonl"), [kit.chat("Who?", "I.")])
    said: list[str] = []
    kit.make(path, tmp_path, progress=said.append)
    assert said == [
        "c.jsonl: chat, from column `messages`",
        "c.jsonl: 1 document as chat, 20 tokens",
        "c.jsonl: 1 row of 64\n        trained 15.0 %, padded 68.8 %, truncated 0.0 %",
    ]
    again: list[str] = []
    kit.make(path, tmp_path, progress=again.append)
    assert again == said[1:]


# ---- what is told ----


def test_seq_len_beyond_the_models_positions(tmp_path: Path) -> None:
    error = error_of(kit.jsonl(Path("t.jsonl"), texts(2)), tmp_path, seq_len=4096, max_positions=2048)
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: seq_len 4,096 is beyond the model's 2,048 positions\n"
        "  where: `data.seq_len` (run.yaml)\n"
        "\n"
        "hint: `--set data.seq_len=2048`"
    )


@pytest.mark.parametrize("cached", [False, True])
def test_a_token_id_that_the_model_does_not_know(tmp_path: Path, cached: bool) -> None:
    path = kit.jsonl(Path("c.jsonl"), [{"text": "Enter Orlando"}])
    if cached:
        kit.make(path, tmp_path)
    error = error_of(path, tmp_path, vocab_size=300)
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: tokenizer and model disagree: the data hold token id 617,\n"
        "       the model knows ids below 300\n"
        "  token: 'land'\n"
        "  where: `tokenizer` (run.yaml)\n"
        "\n"
        "hint: leave out `tokenizer:`, the one beside the weights is used then\n"
        "hint: `model: {shape: ...}` with `vocab_size: 700` fits this one"
    )


def test_an_empty_file_and_a_file_of_empty_texts(tmp_path: Path) -> None:
    Path("t.jsonl").touch()
    error = error_of("t.jsonl", tmp_path)
    assert isinstance(error, OnDisk)
    assert error.text() == (
        "error: data set `t.jsonl` is empty\n  where: `data.train` (run.yaml)\n  why: 1 file read, no record found"
    )
    kit.jsonl(Path("u.jsonl"), [{"text": ""}, {"text": ""}])
    assert error_of("u.jsonl", tmp_path).why == "2 records, none with text"


def test_no_assistant_turn_in_any_conversation(tmp_path: Path) -> None:
    error = error_of(kit.jsonl(Path("c.jsonl"), [kit.chat("Who?"), kit.chat("Why?")]), tmp_path)
    assert isinstance(error, OnDisk)
    assert error.text() == (
        "error: no conversation of `c.jsonl` has an assistant turn with text\n"
        "  where: `data.train` (run.yaml)\n"
        "  why: 2 conversations read, only the assistant's tokens are trained\n"
        "\n"
        "hint: roles are `assistant` in `messages`, `gpt` in `conversations`\n"
        "hint: `--set data.format=text` trains every token of a `text` column"
    )


def test_some_conversations_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    stats = kit.make(kit.jsonl(Path("c.jsonl"), [kit.chat("Who?"), kit.chat("Why?", "So.")]), tmp_path).train.sets[0].stats
    assert (stats.num_documents, stats.unanswered) == (1, 1)


def test_conversations_without_a_chat_template(tmp_path: Path) -> None:
    error = error_of(kit.jsonl(Path("c.jsonl"), [kit.chat("Who?", "I.")]), tmp_path, template=None)
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: the data are conversations, and the tokenizer has no chat template\n"
        "  data: c.jsonl:1, chat, from column `messages`\n"
        "  where: `tokenizer` (run.yaml)\n"
        "\n"
        "hint: `--set tokenizer=FOLDER` of an instruct model\n"
        "hint: put its `chat_template.jinja` into the tokenizer's folder\n"
        "hint: `--set data.format=text` with a column of plain text"
    )


def test_texts_without_an_end_token(tmp_path: Path) -> None:
    tokenizer = kit.tokenizer()
    tokenizer.eos_token = None
    error = error_of(kit.jsonl(Path("t.jsonl"), texts(2)), tmp_path, tokenizer=tokenizer)
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: the tokenizer has no end-of-text token, so texts cannot be told apart\n"
        "  where: `tokenizer` (run.yaml)\n"
        "\n"
        "hint: set `eos_token` in the `tokenizer_config.json` of its folder"
    )


def test_conversations_that_are_all_too_long(tmp_path: Path) -> None:
    path = kit.jsonl(Path("c.jsonl"), [kit.chat(" ".join(WORDS[:200]), "I.")])
    error = error_of(path, tmp_path, long="drop")
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: no token to train on is left in `c.jsonl` at seq_len 64\n"
        "  where: `data.seq_len` (run.yaml)\n"
        "  why: of its conversations, all too long, the shortest has 583 tokens\n"
        "\n"
        "hint: raise `data.seq_len`\n"
        "hint: `--set data.long=truncate` keeps their beginnings"
    )


def test_some_sets_with_a_weight_and_some_without(tmp_path: Path) -> None:
    error = error_of([{"path": "a.jsonl", "weight": 1}, "b.jsonl"], tmp_path)
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: 1 of 2 training sets have a weight\n"
        "  where: `data.train` (run.yaml)\n"
        "  why: `b.jsonl` has none\n"
        "\n"
        "hint: give every set a `weight`, or none: then every row comes once an epoch"
    )


def test_a_weight_of_less_than_one_row(tmp_path: Path) -> None:
    kit.jsonl(Path("a.jsonl"), texts(20))
    kit.jsonl(Path("b.jsonl"), texts(1))
    error = error_of([{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 0.0001}], tmp_path)
    assert isinstance(error, UsageError)
    assert error.what.startswith("weight 0.0001 of `b.jsonl` is less than one row in an epoch of ")


def test_one_conversation_cannot_be_shared_out(tmp_path: Path) -> None:
    error = error_of(kit.jsonl(Path("c.jsonl"), [kit.chat("Who?", "I.")]), tmp_path, validation=0.1)
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: 0.1 of `c.jsonl` cannot be held out: it has one conversation\n"
        "  where: `data.validation` (run.yaml)\n"
        "\n"
        "hint: `--set data.validation=FILE` with other conversations\n"
        "hint: `--set data.validation=null` trains without"
    )


def test_the_same_data_give_the_same_folder_wherever_the_cache_lies(tmp_path: Path) -> None:
    path = kit.jsonl(Path("c.jsonl"), chats(30))
    one = kit.make(path, tmp_path / "one", validation=0.2)
    two = kit.make(path, tmp_path / "two", validation=0.2)
    assert one.folder.name == two.folder.name
    for name in ("train-0.starts.npy", "validation-0.row_ends.npy"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()
