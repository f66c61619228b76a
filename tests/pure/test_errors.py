"""The form of every error: what disagrees, where it came from, why, and what to type; its exit code; its way between processes."""

from __future__ import annotations

import json

import pytest

from shardwise import errors
from shardwise.errors import AnswerIsNo, OnDisk, ShardwiseError, UsageError, nearest

ALL = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, ShardwiseError)]


def test_an_error_is_printed_what_first_then_facts_then_hints():
    error = AnswerIsNo(
        "nothing fits: the nearest layout reserves 62 - 66 GiB, 35.5 are usable",
        lines=[("nearest", "full_shard, recompute full, 1 x 32; peak in the optimizer step")],
        where="`--gpus 2 --device a100-40gb`, `seq_len: 8192` (run.yaml:6)",
        why="fp32 parameters, gradients and AdamW state are 16 bytes a parameter,\n59.8 GiB on each of 2 GPUs",
        hints=["`--gpus 8` fits: 20 - 23 GiB", "`--set lora.rank=16` fits: 16 - 18"],
    )
    assert error.text() == (
        "error: nothing fits: the nearest layout reserves 62 - 66 GiB, 35.5 are usable\n"
        "  nearest: full_shard, recompute full, 1 x 32; peak in the optimizer step\n"
        "  where: `--gpus 2 --device a100-40gb`, `seq_len: 8192` (run.yaml:6)\n"
        "  why: fp32 parameters, gradients and AdamW state are 16 bytes a parameter,\n"
        "       59.8 GiB on each of 2 GPUs\n"
        "\n"
        "hint: `--gpus 8` fits: 20 - 23 GiB\n"
        "hint: `--set lora.rank=16` fits: 16 - 18"
    )


def test_an_error_of_one_line_is_one_line():
    assert OnDisk("run file `a.yaml` does not exist").text() == "error: run file `a.yaml` does not exist"


def test_exit_codes_are_those_of_the_design():
    assert {one.__name__: one.exit_code for one in ALL} == {
        "ShardwiseError": 70, "AnswerIsNo": 1, "UsageError": 2, "NotReady": 3, "OnDisk": 4, "NotFinite": 5, "OutOfMemory": 6,
        "LostWorker": 7, "Interrupted": 130, "Terminated": 143,
    }  # fmt: skip


def test_the_tree_in_the_docstring_names_every_kind_with_its_exit_code():
    for one in ALL:
        assert any(line.split()[:2] == [one.__name__, str(one.exit_code)] for line in (errors.__doc__ or "").splitlines()), (
            one.__name__
        )


@pytest.mark.parametrize("kind", ALL)
def test_an_error_crosses_a_process_border_whole(kind):
    error = kind("what", where="where", why="why", hints=["a", "b"], lines=[("label", "text")], common=True)
    again = ShardwiseError.from_json(json.loads(json.dumps(error.to_json())))
    assert (type(again), again.text(), again.common, again.exit_code) == (kind, error.text(), True, error.exit_code)


def test_an_unknown_kind_from_another_version_is_still_an_error():
    assert ShardwiseError.from_json({**UsageError("x").to_json(), "error": "Newer"}).exit_code == 70


def test_the_nearest_word_is_found_without_regard_to_case_and_none_where_none_is_near():
    known = ["full_shard", "no_shard", "Llama-3.1-8B"]
    assert nearest("FULL_SHRAD", known) == "full_shard"
    assert nearest("llama-3.1-8b", known) == "Llama-3.1-8B"
    assert nearest("banana", known) is None
