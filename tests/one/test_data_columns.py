"""Columns by name: every layout of records that is known gives the same conversation, and an unknown one says how to map it."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.data.columns import Reading, decide, messages_of, prompt_of, text_of
from shardwise.errors import OnDisk, ShardwiseError, UsageError

from . import data_kit as kit

ASKED = [{"role": "user", "content": "Who calls?"}, {"role": "assistant", "content": "Orlando."}]
PLACE = "chats.jsonl:7"


def reading(
    record: dict[str, Any], format: str = "auto", columns: dict[str, str] | None = None, *, has_template: bool = True
) -> Reading:
    return decide(record, PLACE, format=format, columns=columns or {}, has_template=has_template, where=kit.where)


def conversation(record: dict[str, Any], system: str | None = None, **how: Any) -> list[dict[str, Any]]:
    return messages_of(reading(record, **how), record, PLACE, system)


def error_of(record: dict[str, Any], **how: Any) -> ShardwiseError:
    with pytest.raises(ShardwiseError) as caught:
        conversation(record, **how)
    return caught.value


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED},
        {"conversations": [{"from": "human", "value": "Who calls?"}, {"from": "gpt", "value": "Orlando."}]},
        {"messages": [{"from": "user", "value": "Who calls?"}, {"from": "model", "value": "Orlando."}]},
        {"messages": [{**m, "name": None, "tool_calls": None} for m in ASKED]},
        {"instruction": "Who calls?", "input": "", "output": "Orlando."},
        {"instruction": "Who calls?", "output": "Orlando."},
    ],
)
def test_every_known_layout_of_a_conversation_gives_the_same_messages(record: dict[str, Any]) -> None:
    assert conversation(record) == ASKED


def test_prompt_and_completion_are_a_conversation_only_if_asked_for() -> None:
    record = {"prompt": "Who calls?", "completion": "Orlando."}
    assert reading(record).format == "prompt"
    assert conversation(record, format="chat") == ASKED


def test_an_instruction_is_a_conversation_where_there_is_a_template_and_a_prompt_where_there_is_none() -> None:
    record = {"instruction": "Who calls?", "input": "It is late.", "output": "Orlando."}
    assert conversation(record)[0]["content"] == "Who calls?\n\nIt is late."
    plain = reading(record, has_template=False)
    assert plain.text() == "prompt, from columns `instruction`, `output`, `input`"
    assert prompt_of(plain, record, PLACE, None) == ("Who calls?\n\nIt is late.\n\n", "Orlando.")


def test_columns_are_mapped_by_name_and_those_come_first() -> None:
    record = {"text": "other", "frage": "Who calls?", "antwort": "Orlando."}
    mapped = reading(record, columns={"prompt": "frage", "completion": "antwort"})
    assert mapped.text() == "prompt, from columns `frage`, `antwort`"
    assert prompt_of(mapped, record, PLACE, None) == ("Who calls?", "Orlando.")
    assert text_of(reading(record), record, PLACE) == "other"


def test_a_system_prompt_comes_from_the_conversation_else_the_record_else_the_run_file() -> None:
    own = [{"role": "system", "content": "own"}, *ASKED]
    assert conversation({"messages": own, "system": "record"}, "file")[0]["content"] == "own"
    assert conversation({"messages": ASKED, "system": "record"}, "file")[0] == {"role": "system", "content": "record"}
    assert conversation({"messages": ASKED, "system": None}, "file")[0] == {"role": "system", "content": "file"}
    assert conversation({"messages": ASKED}) == ASKED
    record = {"prompt": "Who calls?", "completion": "Orlando."}
    assert prompt_of(reading(record), record, PLACE, "file")[0] == "file\n\nWho calls?"


def test_messages_keep_what_a_template_may_want() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "call"}}]}
    assert conversation({"messages": [ASKED[0], call]})[1] == {**call, "content": ""}


# ---- what is told ----


def test_unknown_columns_are_told_with_what_was_found_and_how_to_map() -> None:
    error = error_of({"question": "Who?", "reply": "I."})
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: no column of the data is known for `format: auto`\n"
        "  found: `question`, `reply`\n"
        "  known: `messages`, `conversations`, `prompt` + `completion`, `instruction`\n"
        "         + `output`, `text`\n"
        "  in: chats.jsonl:7\n"
        "  where: `data.format` (run.yaml)\n"
        "\n"
        "hint: `--set data.columns.text=question` if that is the one"
    )


def test_a_format_that_the_columns_do_not_give_is_told_the_columns_it_needs() -> None:
    error = error_of({"text": "Exeunt."}, format="chat")
    assert error.what == "no column of the data is known for `format: chat`"
    assert error.hints == ("`--set data.columns.messages=text` if that is the one",)


def test_a_mapped_column_that_is_not_there_names_the_nearest() -> None:
    error = error_of({"question": "Who?", "reply": "I."}, columns={"prompt": "questions", "completion": "reply"})
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: column `questions` (for `prompt`) is not in the data\n"
        "  found: question, reply\n"
        "  in: chats.jsonl:7\n"
        "  where: `data.columns` (run.yaml)\n"
        "\n"
        "hint: `--set data.columns.prompt=question`"
    )


def test_a_column_name_of_ours_that_does_not_exist_names_the_nearest() -> None:
    error = error_of({"a": "Who?"}, columns={"promt": "a"})
    assert isinstance(error, UsageError)
    assert error.text() == (
        "error: `promt` is no column shardwise knows\n"
        "  where: `data.columns` (run.yaml)\n"
        "  why: known are text, prompt, completion, system, messages, conversations,\n"
        "       instruction, input, output\n"
        "\n"
        "hint: `prompt: a`"
    )


def test_a_later_record_without_the_column_is_told_with_its_place() -> None:
    with pytest.raises(OnDisk) as caught:
        text_of(reading({"text": "one"}), {"txt": "two"}, "a.jsonl:2")
    assert caught.value.text() == (
        "error: a record has no column `text`\n  found: `txt`\n  where: a.jsonl:2\n  why: the first record of the set has it"
    )


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"text": 3}, "column `text` holds a number, not text"),
        ({"text": None}, "column `text` holds null, not text"),
        ({"prompt": ["Who?"], "completion": "I."}, "column `prompt` holds a list, not text"),
        ({"messages": "Who?"}, "column `messages` holds text, not a list of messages"),
        ({"messages": ["Who?"]}, "message 1 of column `messages` is text, not an object with role and content"),
        ({"messages": [{"content": "Who?"}]}, "message 1 of column `messages` has no `role` and no `from`"),
        ({"messages": [*ASKED, {"role": "user"}]}, "message 3 of column `messages` has no content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "message 1 of column `messages` has a list as content, not text"),
        ({"messages": [{"role": "asistant", "content": ""}]}, "message 1 of column `messages` has the unknown role `asistant`"),
    ],
)
def test_a_record_of_the_wrong_type_is_told_with_its_place(record: dict[str, Any], what: str) -> None:
    how = reading(record)
    with pytest.raises(OnDisk) as caught:
        if how.format == "text":
            text_of(how, record, PLACE)
        elif how.format == "prompt":
            prompt_of(how, record, PLACE, None)
        else:
            messages_of(how, record, PLACE, None)
    assert (caught.value.what, caught.value.where) == (what, PLACE)


def test_an_unknown_role_names_those_that_are_known_and_the_nearest() -> None:
    error = error_of({"messages": [{"role": "asistant", "content": ""}]})
    assert error.text() == (
        "error: message 1 of column `messages` has the unknown role `asistant`\n"
        "  where: chats.jsonl:7\n"
        "  why: known are human, gpt, model, bot, observation, function_call,\n"
        "       system, developer, user, assistant, tool, function, ipython\n"
        "\n"
        "hint: `assistant` is the nearest"
    )
