"""Which columns of a record hold text, prompt or conversation, and the records brought into one of three forms.

    text      one string
    prompt    (prompt, completion), the completion is trained
    chat      a list of {"role", "content"}, what the assistant says is trained

``format: auto`` decides by the columns of the first record: the first row of ``_SHAPES`` whose columns are all there.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OnDisk, UsageError, nearest

# shape -> its columns, and the formats it can be read as, the one that `auto` takes first
_SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("chat",)),
    "conversations": (("conversations",), ("chat",)),
    "prompt": (("prompt", "completion"), ("prompt", "chat")),
    "instruction": (("instruction", "output"), ("chat", "prompt")),
    "text": (("text",), ("text",)),
}
OURS = ("text", "prompt", "completion", "system", "messages", "conversations", "instruction", "input", "output")
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_call": "assistant",
    **{role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython")},
}


@dataclass(frozen=True)
class Reading:
    """How the records of a set are read.

    Attributes:
        format: ``text``, ``prompt`` or ``chat``.
        shape: A key of ``_SHAPES``.
        columns: Our name -> the name in the records, for every column that is read.
    """

    format: str
    shape: str
    columns: dict[str, str]

    def text(self) -> str:
        """For the screen: ``chat, from column `messages` ``."""
        names = [self.columns[ours] for ours in (*_SHAPES[self.shape][0], "input", "system") if ours in self.columns]
        return f"{self.format}, from column{'s' * (len(names) > 1)} " + ", ".join(f"`{n}`" for n in names)


def decide(
    record: Mapping[str, Any],
    place: str,
    *,
    format: str,
    columns: Mapping[str, str],
    has_template: bool,
    where: Callable[[str], str],
) -> Reading:
    """How to read a set, by its first record.

    Args:
        format: ``auto``, ``text``, ``prompt`` or ``chat``.
        columns: Our name -> theirs, as given in the run file.
        has_template: Whether the tokenizer has a chat template: ``auto`` reads ``instruction/output`` as chat only then.

    Raises:
        UsageError: A mapped column is not there, or no known columns are; says what was found and how to map.
    """
    for ours in columns:
        if ours not in OURS:
            close = nearest(ours, OURS)
            raise UsageError(
                f"`{ours}` is no column shardwise knows",
                where=where("data.columns"),
                why=_wrap("known are ", OURS),
                hints=[f"`{close}: {columns[ours]}`"] if close else [],
            )
    for ours, theirs in columns.items():
        if theirs not in record:
            close = nearest(theirs, record)
            raise UsageError(
                f"column `{theirs}` (for `{ours}`) is not in the data",
                where=where("data.columns"),
                lines=[("found", _wrap("", record)), ("in", place)],
                hints=[f"`--set data.columns.{ours}={close or next(iter(record), 'NAME')}`"],
            )
    names = {ours: columns.get(ours, ours) for ours in OURS}

    def named(shape: str) -> bool:  # by the user: those come first
        return any(ours in columns for ours in _SHAPES[shape][0])

    for shape in sorted(_SHAPES, key=lambda s: not named(s)):
        needed, formats = _SHAPES[shape]
        if not all(names[ours] in record for ours in needed) or (format != "auto" and format not in formats):
            continue
        chosen = format if format != "auto" else formats[0]
        if format == "auto" and shape == "instruction" and not has_template:
            chosen = "prompt"
        extra = [ours for ours in ("input",) if shape == "instruction" and names[ours] in record]
        extra += [ours for ours in ("system",) if chosen != "text" and names[ours] in record]
        return Reading(chosen, shape, {ours: names[ours] for ours in (*needed, *extra)})
    wanted = [" + ".join(f"`{c}`" for c in cols) for cols, formats in _SHAPES.values() if format == "auto" or format in formats]
    hint = {"text": "data.columns.text", "prompt": "data.columns.prompt", "chat": "data.columns.messages"}.get(
        format, "data.columns.text"
    )
    raise UsageError(
        f"no column of the data is known for `format: {format}`",
        where=where("data.format"),
        lines=[
            ("found", _wrap("", (f"`{n}`" for n in record)) or "no column at all"),
            ("known", _wrap("", wanted)),
            ("in", place),
        ],
        hints=[f"`--set {hint}={next(iter(record), 'NAME')}` if that is the one"],
    )


def text_of(reading: Reading, record: Mapping[str, Any], place: str) -> str:
    """The text of a record in form ``text``."""
    return _string(record, reading.columns["text"], place)


def prompt_of(reading: Reading, record: Mapping[str, Any], place: str, system: str | None) -> tuple[str, str]:
    """Prompt and completion of a record in form ``prompt``; parts of an instruction are parted by an empty line."""
    begin = _system(reading, record, place) or system
    parts = [begin] if begin else []
    if reading.shape == "prompt":
        parts.append(_string(record, reading.columns["prompt"], place))
        return "\n\n".join(parts), _string(record, reading.columns["completion"], place)
    parts.append(_instruction(reading, record, place))
    return "\n\n".join(parts) + "\n\n", _string(record, reading.columns["output"], place)


def messages_of(reading: Reading, record: Mapping[str, Any], place: str, system: str | None) -> list[dict[str, Any]]:
    """The conversation of a record in form ``chat``, with a system message first if the record, or the run file, has one.

    Raises:
        OnDisk: A message without role or content, of the wrong type, or of an unknown role; names the place.
    """
    if reading.shape in ("messages", "conversations"):
        column = reading.columns[reading.shape]
        turns = _value(record, column, place)
        if not isinstance(turns, list):
            raise _wrong_type(column, turns, "a list of messages", place)
        messages = [_message(turn, number, column, place) for number, turn in enumerate(turns, 1)]
    else:
        asked, answered = ("prompt", "completion") if reading.shape == "prompt" else ("", "output")
        user = _string(record, reading.columns[asked], place) if asked else _instruction(reading, record, place)
        messages = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": _string(record, reading.columns[answered], place)},
        ]
    begin = _system(reading, record, place) or system
    if begin and not (messages and messages[0]["role"] in ("system", "developer")):
        messages.insert(0, {"role": "system", "content": begin})
    return messages


def _message(turn: Any, number: int, column: str, place: str) -> dict[str, Any]:
    name = f"message {number} of column `{column}`"
    if not isinstance(turn, dict):
        raise OnDisk(
            f"{name} is {kind_name(turn)}, not an object with role and content",
            where=place,
            hints=['`{"role": "user", "content": "..."}` is a message'],
        )
    # Parquet gives every message all keys of the column, absent ones as null.
    turn = {key: value for key, value in turn.items() if value is not None}
    role, content = turn.pop("role", turn.pop("from", None)), turn.pop("content", turn.pop("value", None))
    if role is None:
        raise OnDisk(f"{name} has no `role` and no `from`", where=place, lines=[("found", _wrap("", turn) or "nothing else")])
    if role not in _ROLES:
        close = nearest(str(role), _ROLES)
        raise OnDisk(
            f"{name} has the unknown role `{role}`",
            where=place,
            why=_wrap("known are ", _ROLES),
            hints=[f"`{close}` is the nearest"] if close else [],
        )
    if content is None and "tool_calls" in turn:
        content = ""
    if not isinstance(content, str):
        raise OnDisk(
            f"{name} has {'no content' if content is None else f'{kind_name(content)} as content, not text'}", where=place
        )
    return {"role": _ROLES[role], "content": content, **turn}


def _instruction(reading: Reading, record: Mapping[str, Any], place: str) -> str:
    instruction = _string(record, reading.columns["instruction"], place)
    given = record.get(reading.columns.get("input", ""))
    if given is None or given == "":
        return instruction
    return instruction + "\n\n" + _string(record, reading.columns["input"], place)


def _system(reading: Reading, record: Mapping[str, Any], place: str) -> str | None:
    column = reading.columns.get("system")
    if column is None or record.get(column) is None:
        return None
    return _string(record, column, place)


def _value(record: Mapping[str, Any], column: str, place: str) -> Any:
    if column not in record:
        raise OnDisk(
            f"a record has no column `{column}`",
            where=place,
            lines=[("found", _wrap("", (f"`{n}`" for n in record)) or "no column at all")],
            why="the first record of the set has it",
        )
    return record[column]


def _string(record: Mapping[str, Any], column: str, place: str) -> str:
    value = _value(record, column, place)
    if not isinstance(value, str):
        raise _wrong_type(column, value, "text", place)
    return value


def _wrong_type(column: str, value: Any, wanted: str, place: str) -> OnDisk:
    return OnDisk(f"column `{column}` holds {kind_name(value)}, not {wanted}", where=place)


def kind_name(value: Any) -> str:
    """What a JSON value is, as a person says it."""
    names = {
        str: "text",
        list: "a list",
        dict: "an object",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _wrap(begin: str, names: Iterable[str]) -> str:
    """Names on lines short enough to stand behind a label."""
    return textwrap.fill(begin + ", ".join(names), width=68, break_on_hyphens=False, break_long_words=False)
