"""Errors a user can meet, each with its exit code and a way out.

    ShardwiseError            70  our own bug, when nothing below applies
      AnswerIsNo               1  it ran, and the answer is no (nothing fits, a check failed)
      UsageError               2  the command line or the run file
      NotReady                 3  this machine cannot do it now (devices, ports, disk, network)
      OnDisk                   4  something on disk is missing, torn or of another run
      NotFinite                5  loss or gradient is NaN or infinite
      OutOfMemory              6
      LostWorker               7  a worker hangs or is gone
      Interrupted            130  Ctrl-C
      Terminated             143  SIGTERM, after a whole save

The text form is fixed (see ``ShardwiseError.text``) and pinned by tests letter for letter. Errors cross process borders as JSON.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

EXIT_OK = 0


class ShardwiseError(Exception):
    """An error with its cause, its place and one to three things to type that work.

    Args:
        what: First line: the two things that disagree, both values, units. No period.
        lines: Further ``label: text`` facts, printed in order below the first line.
        where: Where the value came from: flag, ``file:line``, checkpoint, rank, parameter.
        why: One clause; leave out what ``what`` says already.
        hints: Things to type, backticks around what is typed.
        common: Every rank met it alike, so that no rank is to blame.
    """

    exit_code = 70

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        why: str = "",
        hints: Sequence[str] = (),
        lines: Sequence[tuple[str, str]] = (),
        common: bool = False,
    ) -> None:
        super().__init__(what)
        self.common = common
        self.what, self.where, self.why = what, where, why
        self.hints, self.lines = tuple(hints), tuple((a, b) for a, b in lines)

    def text(self) -> str:
        """The error as it is printed; continuation lines are indented, hints stand apart."""
        facts = [*self.lines]
        if self.where:
            facts.append(("where", self.where))
        if self.why:
            facts.append(("why", self.why))
        out = [f"error: {self.what}"]
        out += [f"  {label}: " + text.replace("\n", "\n" + " " * (len(label) + 4)) for label, text in facts]
        if self.hints:
            out += ["", *(f"hint: {hint}" for hint in self.hints)]
        return "\n".join(out)

    def to_json(self) -> dict[str, Any]:
        """What another process needs to raise the same error."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "hints": list(self.hints),
            "lines": [list(line) for line in self.lines],
            "common": self.common,
        }

    @staticmethod
    def from_json(record: dict[str, Any]) -> ShardwiseError:
        kind = _KINDS.get(record["error"], ShardwiseError)
        return kind(
            record["what"],
            where=record["where"],
            why=record["why"],
            hints=record["hints"],
            lines=[(a, b) for a, b in record["lines"]],
            common=record["common"],
        )


class AnswerIsNo(ShardwiseError):
    exit_code = 1


class UsageError(ShardwiseError):
    exit_code = 2


class NotReady(ShardwiseError):
    exit_code = 3


class OnDisk(ShardwiseError):
    exit_code = 4


class NotFinite(ShardwiseError):
    exit_code = 5


class OutOfMemory(ShardwiseError):
    exit_code = 6


class LostWorker(ShardwiseError):
    exit_code = 7


class Interrupted(ShardwiseError):
    exit_code = 130


class Terminated(ShardwiseError):
    exit_code = 143


_KINDS = {
    kind.__name__: kind
    for kind in (
        ShardwiseError,
        AnswerIsNo,
        UsageError,
        NotReady,
        OnDisk,
        NotFinite,
        OutOfMemory,
        LostWorker,
        Interrupted,
        Terminated,
    )
}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like ``word``, without regard to case, or None."""
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None
