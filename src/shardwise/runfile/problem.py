"""Problems of a run file and the one error that tells them all, each with its place and a way out."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.combinations import Write
from ..errors import UsageError

_REFERENCE = "docs/run-file.md has every key: what it takes, its default and its price"
_WIDTH = 74  # of 80 columns, after a number of two digits and its indent


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a run file.

    Attributes:
        head: The key with its value and where it was given.
        what: What is wrong, read after ``head``.
        ways: What to do instead; several are alternatives.
        order: Sorts the problems: line of the file, then the ``--set`` flags.
        by_flag: It came by ``--set``, and so does the way out.
        gives: Keys that a way out will set: they are not missing then.
    """

    head: str
    what: str
    ways: tuple[Write | str, ...]
    order: int = 0
    by_flag: bool = False
    gives: frozenset[str] = field(default_factory=frozenset)


def error_of(name: str, problems: Sequence[Problem], values: Mapping[str, Any]) -> UsageError:
    """All problems in one error, in the order of the file.

    Args:
        values: The run file as read, to know which sections are there to write under.
    """
    lines = [(str(number), _text(one, values)) for number, one in enumerate(sorted(problems, key=lambda one: one.order), 1)]
    return UsageError(
        f"{name}: {len(problems)} problem{'s' if len(problems) != 1 else ''}", lines=lines, hints=[_REFERENCE], common=True
    )


def _text(problem: Problem, values: Mapping[str, Any]) -> str:
    out = [problem.head, *_wrap(problem.what)]
    if problem.ways:
        way = ", or ".join(_way(one, values, problem.by_flag) for one in problem.ways)
        out += _wrap(way if isinstance(problem.ways[0], str) else f"write {way}")
    return "\n".join(out)


def _way(way: Write | str, values: Mapping[str, Any], by_flag: bool) -> str:
    if isinstance(way, str):
        return way
    then = f" ({way.then})" if way.then else ""
    if by_flag:
        quote = "'" if any(c in way.value for c in ' {}[]*&$"<>|#') else ""
        return f"`--set {quote}{way.key}={way.value}{quote}`{then}"
    *parents, last = way.key.split(".")
    return (
        f"`{last}: {way.value}` under `{'.'.join(parents)}`"
        if parents and _is_mapping(values, parents)
        else "`" + "".join(f"{one}: {{" for one in parents) + f"{last}: {way.value}" + "}" * len(parents) + "`"
    ) + then


def _is_mapping(values: Any, path: Sequence[str]) -> bool:
    for part in path:
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdigit() and int(part) < len(values):
            values = values[int(part)]
        else:
            return False
    return isinstance(values, Mapping)


def _wrap(text: str) -> list[str]:
    """Lines of at most 74 columns; what stands in backticks is never broken, so that it can be copied."""
    parts = text.replace("\n", " ").split("`")
    whole = "`".join(part.replace(" ", "\0") if at % 2 else part for at, part in enumerate(parts))
    return [line.replace("\0", " ") for line in textwrap.wrap(whole, _WIDTH, break_long_words=False, break_on_hyphens=False)]
